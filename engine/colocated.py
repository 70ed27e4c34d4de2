"""Which drafters in the target's process are queried: they share its device, so drafts must save more than they cost."""

from collections.abc import Collection, Sequence

from cluster.types import Commit
from router.break_even import BreakEvenGate, saved_s
from router.cost_model import CostModel


class ColocatedDrafters:
    """Decides for each batch size whether a drafter in the target's process is queried: its drafts must save more time than
    the target waits for them. What must be sent to a drafter that is not queried waits in its outbox. ``names``: of those
    drafters."""

    def __init__(self, names: Collection[str]) -> None:
        self._gates = {name: BreakEvenGate() for name in names}
        self._batch = 1  # requests of the last pass that sampled
        self._waiting_since_s: float | None = None  # the target waits for proposals
        self._awaited: set[str | None] = set()  # drafters of these proposals

    def __bool__(self) -> bool:
        return bool(self._gates)

    def is_queried(self, drafter: str) -> bool:
        """True for a drafter in another process."""
        gate = self._gates.get(drafter)
        return gate is None or gate.is_queried

    def shares_device(self, drafter: str) -> bool:
        """Whether it computes on the target's device."""
        return drafter in self._gates

    def choose(self, batch: int) -> None:
        """Decides who is queried for the next proposals of ``batch`` requests."""
        for gate in self._gates.values():
            gate.decide(batch)
        self._batch = batch

    def note_pass(self, commits: Sequence[Commit], batch: int, num_context: int, cost: CostModel) -> None:
        """Records the time that each drafter's drafts saved in a pass over ``batch`` sequences."""
        for name, gate in self._gates.items():
            own = [commit for commit in commits if commit.drafter == name]
            if own:
                num_verified = sum(commit.num_proposed for commit in own)
                num_accepted = sum(commit.num_accepted for commit in own)
                gate.note_saved(batch, saved_s(batch, num_verified, num_accepted, num_context, cost))

    def note_plan(self, awaited: Collection[str | None], begins_pass: bool, now_s: float) -> None:
        """A plan holds requests for proposals of the drafters ``awaited``. Where it begins no pass, the target waits for
        them: that time counts as what their drafts cost."""
        if begins_pass:
            waited_s = 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s
            for name, gate in self._gates.items():
                gate.note_draft(self._batch, waited_s if name in self._awaited else 0.0)
        elif awaited:
            self._awaited |= set(awaited)
            if self._waiting_since_s is None:
                self._waiting_since_s = now_s
            return
        self._waiting_since_s = None
        self._awaited.clear()

    def note_overhead(self, seconds: float) -> None:
        """The last round took so long beside its pass."""
        for gate in self._gates.values():
            gate.note_rest(self._batch, seconds)
