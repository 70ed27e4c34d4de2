"""The default: the mode with the shortest expected round."""

from collections.abc import Mapping, Sequence

from router.cost_model import CostModel
from router.draft_wait import held_until
from router.overlap.frontiers import Frontiers
from router.overlap.gains import Pipeline
from router.overlap.policy import PassStart
from router.overlap.rules import before_frontiers, by_gain, in_micro_batches
from router.plan import NO_PROMPTS, DrafterView, PromptRows, SequenceView


class ByGain:
    """A request is held for its proposal no longer than the proposal is worth (``router.draft_wait``). Micro-batches and
    frontiers are used where measured times say that they shorten the round by more than noise."""

    def __init__(self, max_hold_s: float) -> None:
        self._max_hold_s = max_hold_s
        self._frontiers = Frontiers()

    def start(
        self,
        decoding: Sequence[SequenceView],
        drafters: Mapping[str, DrafterView],
        cost: CostModel,
        now_s: float,
        prompts: PromptRows = NO_PROMPTS,
    ) -> PassStart:
        held = held_until(decoding, drafters, self._max_hold_s, cost, now_s)
        pipeline = Pipeline(decoding, drafters, cost)
        num = pipeline.num_micro_batches()
        if num > 1:  # drafters have the other micro-batches to draft for, and need no frontier
            self._frontiers.clear()
            return in_micro_batches(decoding, held, num)
        return before_frontiers(by_gain(decoding, held, drafters, cost, now_s, prompts), self._frontiers, pipeline)
