"""Whether drafting pays, and how far: the seconds of the target that drafts save.

    saved = accepted tokens / r  -  (time of the pass with the draft rows - without)  -  exposed share * time of the drafts

r: tokens per second that the batch decodes at present (`DecodeRate`). Times of passes come from the cost model, which passes
correct; times of drafts and acceptance are measured (`DrafterView`). A price is the same in tokens: seconds times r.

`DraftingValue` answers for a round: which drafter pays, how long its drafts should be, how long a round with them takes.
`saved_s` is what came of a pass. The drafter ends drafts by `DraftTerms`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import field
from itertools import accumulate

from cluster.config import DEFAULT_DRAFT_LEN
from cluster.types import PRICE_SHARE, record
from router.assignment import drafter_of
from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean
from router.plan import UNKNOWN_DRAFTER, DrafterView
from router.planning.slo import NO_LIMITS, RoundLimits

# Of a proposal that is awaited: without it an estimate of zero accepted tokens could never recover.
MIN_ACCEPTED = 0.05
PRICE_STEPS = 64  # a row price is rounded to this share of a token, so that it rarely changes and is rarely sent


@record
class DraftingValue:
    """What is measured when the drafts of the next round are decided, and what follows from it."""

    cost: CostModel
    drafters: Mapping[str, DrafterView] = field(default_factory=dict)  # those that are linked and draft for a request
    row_price: float = 0.0  # in tokens, as `row_price`
    tokens_per_s: float | None = None  # that the present batch decodes; None: not known yet
    num_micro_batches: int = 1  # of the present plan; with more than one, drafts are made while others are verified
    limits: RoundLimits = NO_LIMITS  # what the objectives of decoding requests leave a round
    partition: str = ""  # compute partition of the drafters in the target's process; "": they have none of their own

    def view(self, drafter: str) -> DrafterView:
        return self.drafters.get(drafter, UNKNOWN_DRAFTER)

    def waiting_rate(self, drafter: str) -> float:
        """Tokens that the batch could decode in a second of this drafter's drafting. 0: not known."""
        return (self.tokens_per_s or 0.0) * (self.view(drafter).exposure if self.num_micro_batches > 1 else 1.0)

    def draft_s(self, drafter: str, num_requests: int, length: int) -> float:
        """Seconds of a batch of drafts of ``length`` tokens, with the transit of its replies: as measured; before that as
        profiled; before both in proportion to replies."""
        view = self.view(drafter)
        profiled_s = self.cost.draft_s(drafter_of(drafter), num_requests, length)
        known_s = self.measured_s(drafter, num_requests, length) or profiled_s
        if known_s is None:
            return view.reply_s * length / (view.draft_len or DEFAULT_DRAFT_LEN)
        return known_s + (view.transit_s or 0.0)

    def measured_s(self, drafter: str, num_requests: int, length: int) -> float:
        """The same as measured, without transit; for another batch or length by the profile's ratio or, without one, in
        proportion to the length. 0: not known."""
        view, own = self.view(drafter), drafter_of(drafter)
        if not view.draft_s:
            return 0.0
        usual_len = view.draft_len or DEFAULT_DRAFT_LEN
        usual_s = self.cost.draft_s(own, max(1, round(view.batch)), max(1, round(usual_len)))
        profiled_s = self.cost.draft_s(own, num_requests, length) if usual_s else None
        if usual_s and profiled_s is not None:
            return view.draft_s * profiled_s / usual_s
        return view.drafts_s(num_requests) * length / usual_len

    def pays(self, drafter: str, num_requests: int, num_context: int, max_len: int, share: float = 1.0) -> bool:
        """Whether drafts of any length up to ``max_len``, for all requests, save more than ``share`` of the wait for them.

        A pass verifies as many of the draft tokens as save most: at the price of a row they might save nothing. At a knee of
        the cost, where rows are scarce, the rows before it are worth more than they cost. Always of one that shares the
        target's device: `ColocatedDrafters` decides whether it drafts.
        """
        rate, lost_rate = self.waiting_rate(drafter), self.tokens_per_s or 0.0
        if not rate or self.view(drafter).shares_device:
            return True
        table = self.cost.table(num_context // self.num_micro_batches)
        start = num = -(-num_requests // self.num_micro_batches)
        acceptance, plain_s = self.view(drafter).acceptance, table.at(num)
        survivals, best = 0.0, 0.0
        for length in range(1, max_len + 1):
            survival, end = acceptance**length, start + num
            # The gain is linear between the table's points, so that the most is at one of them or at an end.
            for rows in (*table.rows[bisect_right(table.rows, start) : bisect_left(table.rows, end)], end):
                lost = lost_rate * (table.at(rows) - plain_s)
                best = max(best, survivals + survival * (rows - start) - lost)
            if best * num_requests > num * rate * share * self.draft_s(drafter, num_requests, length):
                return True
            survivals, start = survivals + survival * num, end
        return False

    def worth_s(self, drafter: str, num_context: int) -> float:
        """The longest that one request should wait for its proposal: what its accepted tokens take in plain decoding."""
        accepted = max(self.view(drafter).accepted_per_round, MIN_ACCEPTED)
        return accepted * self.cost.step_s(1, num_context)

    def all_worth_s(self, expected: Mapping[str, tuple[str, float]]) -> float:
        """The longest that a whole batch should wait for proposals. ``expected``: by request its drafter, and the accepted
        tokens of the draft that it has otherwise."""
        gains = [self.view(drafter).accepted_per_round - num for drafter, num in expected.values()]
        return sum([max(0.0, gain) for gain in gains]) / self.tokens_per_s if self.tokens_per_s else 0.0

    def best_len(self, drafter: str, num_requests: int, max_len: int, row_price: float) -> int:
        """The length at which drafts for all requests, all of whom wait for the longest, save most; at least 1. Without a
        profile the longest: what one token more takes is not known."""
        if self.cost.draft_s(drafter_of(drafter), num_requests, max_len) is None:
            return max_len
        acceptance, rate = self.view(drafter).acceptance, self.tokens_per_s or 0.0
        gains = accumulate(max(0.0, acceptance**k - PRICE_SHARE * row_price) for k in range(1, max_len + 1))
        nets = [num_requests * gain - rate * self.draft_s(drafter, num_requests, k) for k, gain in enumerate(gains, 1)]
        return 1 + nets.index(max(nets))

    def round_s(self, drafter: str, num_requests: int, num_drafted: int, num_context: int, length: int) -> float:
        """A round that waits for drafts of this length for ``num_drafted`` of the requests."""
        if not length:
            return self.cost.step_s(num_requests, num_context)
        num_accepted = num_drafted * (expected_tokens(self.view(drafter).acceptance, length) - 1.0)
        return self.cost.step_s(num_requests + round(num_accepted), num_context) + self.draft_s(
            drafter, num_requests, length
        )


def expected_tokens(acceptance: float, draft_len: float) -> float:
    """Of a proposal, bonus token included: L(c) = (1 - a^(c+1)) / (1 - a)."""
    if acceptance >= 1.0:
        return draft_len + 1.0
    return float((1.0 - acceptance ** (draft_len + 1)) / (1.0 - acceptance))


def saved_s(
    num_sequences: int, num_verified: int, num_accepted: int, num_context: int, cost: CostModel, num_prompt_rows: int = 0
) -> float:
    """Time that drafts saved in a pass over so many sequences: what their accepted tokens would have added to plain passes,
    less what verifying them added to this one.

    Args:
        num_prompt_rows: that this pass had and later ones will have. Where prompts fill passes anyway, fewer rounds save the
            rows of decoding alone.
    """

    def pass_s(num_rows: int) -> float:
        seconds = cost.step_s(num_rows, num_context)
        if num_prompt_rows:
            seconds += cost.prefill_s(num_rows + num_prompt_rows, 0) - cost.prefill_s(num_rows, 0)
        return seconds

    plain_s = pass_s(num_sequences)
    without_s = cost.prefill_s(num_prompt_rows, 0) if num_prompt_rows else 0.0
    token_s = max(0.0, plain_s - without_s) / num_sequences
    return num_accepted * token_s - (pass_s(num_sequences + num_verified) - plain_s)


def row_price(
    tokens_per_s: float | None, num_rows: int, num_context: int, cost: CostModel, best_left_out: float = 0.0
) -> float:
    """What a row is worth, from 0 to 1: a draft token less likely to survive is not worth its row.

    That is the number of tokens that could be decoded in its time. At a knee of the cost, where the next row takes longer
    than the last one, rows are scarce: one is worth the best token that has none, between the prices of both.

    Args:
        best_left_out: survival of the best draft token without a row.
    """
    if tokens_per_s is None:
        return 0.0
    here_s = cost.step_s(num_rows, num_context)
    next_price = tokens_per_s * (cost.step_s(num_rows + 1, num_context) - here_s)
    last_price = next_price
    if num_rows > 1:
        last_price = tokens_per_s * (here_s - cost.step_s(num_rows - 1, num_context))
    price = min(next_price, max(last_price, best_left_out))
    return max(0.0, min(1.0, price))  # a cost that is corrected meanwhile may fall


class QuotedPrice:
    """A price that is told to drafters. It stays while the true one is within ``share`` of it, or within ``least``: a price
    that moves about a threshold would make lengths flap, and each change is a message."""

    def __init__(self, share: float = 0.0, least: float = 0.0) -> None:
        self._share, self._least = share, least
        self.value = 0.0

    def follow(self, price: float) -> bool:
        """Takes note of the true price. Returns whether the quoted one changed."""
        margin = max(self._least, self._share * self.value)
        if abs(price - self.value) <= margin and (price or not self.value):
            return False
        changed = price != self.value
        self.value = price
        return changed


class DecodeRate:
    """How many times faster than plain decoding the last rounds decoded: tokens of a request and round, over the plain
    passes of its batch that the round lasted.

    Whole rounds count, but for the time that prompts took in a pass, and each counts the same, whatever its batch. A rate
    itself would lag behind a batch that grows or shrinks: its share of each request would price drafts by a batch that is
    gone.
    """

    def __init__(self) -> None:
        self._tokens, self._plain_passes = DecayedMean(), DecayedMean()
        self._last: tuple[float, float, float, float] | None = None  # of the last round, if it decoded

    @property
    def over_plain(self) -> float | None:
        """None: not known yet."""
        return self._tokens.value / self._plain_passes.value if self._plain_passes.is_known else None

    def note(self, began_s: float, num_tokens: int, prompts_s: float, num_requests: int, plain_s: float) -> None:
        """A round that began at ``began_s`` decoded so many tokens; prompts took ``prompts_s`` of its pass.

        Args:
            num_requests: that decode; 0: they had only begun, and the round does not count.
            plain_s: of a plain pass of them.
        """
        if self._last is not None:
            last_began_s, num_each, last_prompts_s, last_plain_s = self._last
            seconds = began_s - last_began_s - last_prompts_s
            if seconds > 0.0:  # else the prompts' time was overestimated
                self._tokens.add(num_each)
                self._plain_passes.add(self._plain_passes.clipped(seconds / last_plain_s))
        decodes = num_tokens and num_requests
        self._last = (began_s, num_tokens / num_requests, prompts_s, plain_s) if decodes else None

    def interrupt(self) -> None:
        """A round decoded nothing: the time until the next one does not count."""
        self._last = None
