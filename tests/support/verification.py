"""Decoding sequences, costs with cliffs, and the best rows of a pass by trying all."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from router.cost_model import CostModel, TableCost, padded
from router.drafting.policies import VERIFICATION_POLICIES
from router.drafting.verification import MIN_CHUNK_LEN, PassContext, PassRows
from router.plan import Capacity, DrafterView, SequenceView

CAPACITY = Capacity(
    block_len=4, num_blocks=100, num_free_blocks=100, max_num_sequences=16, max_pass_tokens=64, max_model_len=200
)


class RowsAttend(TableCost):
    """As measured by a profile: rows of a prompt's chunk take longer the more that prompt has before them."""

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.at(num_rows) * (1.0 + num_context / 2000)


DRAFTERS = {"d": DrafterView(reply_s=0.0, accepted_per_round=1.0, acceptance=0.6)}
COMMITTED_LEN = 20


def decoding(name: str, survival: Sequence[float], num_drafted: int | None = None) -> SequenceView:
    return SequenceView(
        request_id=name,
        committed_len=COMMITTED_LEN,
        computed_len=COMMITTED_LEN - 1,
        num_drafted=len(survival) if num_drafted is None else num_drafted,
        running=True,
        drafter="d",
        awaiting_since_s=None,
        max_new_tokens=50,
        survival=tuple(survival),
    )


def decide(policy: str, batch: Sequence[SequenceView], context: PassContext) -> PassRows:
    return VERIFICATION_POLICIES[policy]().rows(batch, context)


def a_pass(cost: CostModel, num_prompt_tokens: int = 0, **capacity: object) -> PassContext:
    limits = replace(CAPACITY, **capacity)  # type: ignore[arg-type]
    return PassContext(DRAFTERS, limits, cost, now_s=0.0, num_prompt_tokens=num_prompt_tokens)


@dataclass(frozen=True)
class Drawn:
    """A pass to decide."""

    batch: tuple[SequenceView, ...]
    context: PassContext

    def seconds(self, num_drafts: int, num_prompts: int = 0) -> float:
        cost, num_ready = self.context.cost, len(self.batch)
        return cost.step_s(num_ready + num_drafts + num_prompts, num_ready * COMMITTED_LEN)

    def expected(self, lens: Sequence[int]) -> float:
        weight = self.context.weights
        of_each = zip(self.batch, lens, strict=True)
        return sum(weight.get(s.request_id, 1.0) * (1.0 + sum(s.survival[:length])) for s, length in of_each)

    def is_allowed(self, num_drafts: int, num_prompts: int = 0) -> bool:
        limit_s = self.context.limit_s
        if len(self.batch) + num_drafts + num_prompts > self.context.capacity.max_pass_tokens:
            return False
        return limit_s is None or num_drafts == 0 or self.seconds(num_drafts, num_prompts) <= limit_s

    def choices(self) -> list[tuple[int, ...]]:
        every = itertools.product(*(range(len(s.survival) + 1) for s in self.batch))
        return [lens for lens in every if self.is_allowed(sum(lens), self.least_prompts)]

    @property
    def least_prompts(self) -> int:
        return min(max(MIN_CHUNK_LEN, self.context.num_due_tokens), self.context.num_prompt_tokens)

    def best_rate(self) -> float:
        """The most expected tokens per second of a pass without prompts, within its limits."""
        return max(self.expected(lens) / self.seconds(sum(lens)) for lens in self.choices() if self.is_allowed(sum(lens)))

    def lens_of(self, rows: PassRows) -> tuple[int, ...]:
        return tuple(rows.verify_lens)


@st.composite
def survivals(draw: st.DrawFn, max_len: int = 4) -> tuple[float, ...]:
    rates = draw(st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.8, 0.97, 1.0]), max_size=max_len))
    return tuple(itertools.accumulate(rates, lambda a, b: a * b))


@st.composite
def cliff_costs(draw: st.DrawFn) -> TableCost:
    """Monotone, with flat stretches, slopes and jumps between successive numbers of rows."""
    jumps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.04]), min_size=1, max_size=40))
    seconds = tuple(itertools.accumulate(jumps, initial=0.02))
    return TableCost(tuple(range(1, len(seconds) + 1)), seconds, draw(st.sampled_from([0.0, 1e-5])))


@st.composite
def passes(draw: st.DrawFn, prompts: bool = False) -> Drawn:
    batch = [decoding(str(i), draw(survivals())) for i in range(draw(st.integers(1, 3)))]
    shapes = draw(st.sampled_from([(), (1, 2, 4, 8), (4, 16)]))
    num_prompts = draw(st.integers(1, 40)) if prompts else 0
    room = draw(st.integers(min(16, num_prompts), 60))
    capacity = replace(CAPACITY, max_pass_tokens=len(batch) + room)
    weights = {"0": draw(st.sampled_from([1.0, 0.5, 3.0]))} if draw(st.booleans()) else {}
    limit_s = draw(st.sampled_from([None, None, 0.01, 0.03, 0.06]))
    cost = padded(draw(cliff_costs()), shapes)
    num_prompts = min(num_prompts, room)
    num_due = draw(st.integers(0, num_prompts))
    context = PassContext(DRAFTERS, capacity, cost, 0.0, num_prompts, limit_s, weights, num_due, limit_s)
    return Drawn(tuple(batch), context)
