"""The compute partition in use: which lane the target's thread is in, and where the drafters on its device draft."""

from engine.colocated import END_DEADLINE_S, ColocatedDrafters, InlineDrafters
from engine.partition import Partition
from engine.sequences import Sequences
from profiler.online_cost import OnlineCost
from router.cost_model import CostModel
from router.drafting.partition_choice import PartitionChoice


class Lanes:
    """Owned by the target's thread, which enters lanes between rounds. In a split each drafter has a thread in the drafters'
    lane; on the whole device the target's thread steps them.

    A change begins by ending the threads of drafters, so that the next ones find their caches computed. Rounds go on in the
    partition before until they have ended: a drafter that hangs delays the change, and no stream. Within a split the
    target's hidden states are all that one lane writes and another reads (`engine.hidden_states` orders them by events), and
    no lane frees what another has allocated.
    """

    def __init__(
        self,
        partition: Partition,
        choice: PartitionChoice,
        inline: InlineDrafters,
        companions: ColocatedDrafters,
        cost: CostModel,
    ) -> None:
        self._whole = partition.whole
        self._splits = {split.name: split for split in partition.splits}
        self._choice = choice
        self._inline, self._companions, self._cost = inline, companions, cost
        self._current: str | None = None  # None: no thread runs the round

    def follow(self, sequences: Sequences) -> str:
        """Enters the partition of the next round, over those that run, once no thread drafts in the one before. Returns the
        name of the one that it is in."""
        name = self._choice.choose(sequences.num_running, lambda: sum([len(s.token_ids) for s in sequences if s.running]))
        if name == self._current and not self._inline.is_ending:
            return name
        if not self._inline.end_threads() and self._current is not None:
            return self._current
        split = self._splits.get(name)
        (self._whole if split is None else split.target).enter()
        if isinstance(self._cost, OnlineCost) and name in self._choice.costs:
            self._cost.rebase(self._choice.costs[name])
        self._companions.draft_apart = split is not None
        self._inline.draft_in(None if split is None else split.drafter)
        self._current = name
        return name

    def leave(self) -> None:
        """Ends the threads of drafters; ``follow`` enters anew, on any thread."""
        self._inline.end_threads(END_DEADLINE_S)
        self._inline.draft_in(None)
        self._current = None
