"""Expected round times with and without overlap, from measured times of passes and drafts.

t_v(r): a pass of r rows; t_d(b): a batch of drafts for b requests; B requests; L(c): expected tokens of a proposal of c
tokens, bonus token included, at acceptance a per token.

- barrier: t_v(B) + max_j t_d,j(b_j). All drafters are awaited, then all requests are verified.
- n micro-batches (SPIN, V.B; MineDraft's alternation is n = 2): a round of all takes
  max(n t_v(B/n), max_j t_v(B/n) + reply_j(b_j/n), max_j n t_d,j(b_j/n)).
  They are compared with a barrier by tokens per second, each at its best length of drafts: drafts that take no time of the
  target grow, and long drafts make a barrier look slow.
- frontier (FASER, 4.3) of chunks of c tokens: while one is verified, m = min(c, t_v/t - 1) tokens and the bonus token are
  drafted from the drafter's own guess (t: one token of drafts for all); m = 1 where t_v is too short for any. They are right
  with probability p_c = a^(c+1), behind such a chunk with p_m. So a share x = p_c / (1 - p_m + p_c) of a request's rounds
  is right and has L(m) tokens. Where all are, with probability x^B, a round takes max(t_v, (m + 1) t); else all wait for
  new chunks of those that were wrong, t_v + c t', and half a token more where a correction comes in mid-token. t' is one
  token of drafts for these, (1 - x) B / (1 - x^B) requests on average. How near simulated frontiers came to that is in
  docs/measurements/overlap.md.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter

from router.cost_model import CostModel, TableCost
from router.drafting.value import DraftingValue, expected_tokens
from router.plan import UNKNOWN_DRAFTER, DrafterView, SequenceView

MAX_MICRO_BATCHES = 8
MICRO_BATCH_MARGIN = 0.15  # share of the time that they must be expected to save; simulated ones save less by as much
_DRAFTER = attrgetter("drafter")


class Pipeline:
    """The requests that drafters draft for, and the times of their rounds."""

    def __init__(self, decoding: Sequence[SequenceView], drafters: Mapping[str, DrafterView], cost: CostModel) -> None:
        drafted = [s for s in decoding if s.drafter is not None and s.max_new_tokens > 1]
        counts: Counter[str] = Counter(map(_DRAFTER, drafted))
        self.num_context = sum([s.committed_len for s in drafted])
        self.drafters = {name: (drafters.get(name, UNKNOWN_DRAFTER), num) for name, num in counts.items()}
        self.num_requests = len(drafted)
        self.shares_device = any(drafter.shares_device for drafter, _ in self.drafters.values())
        self._cost, self._value = cost, DraftingValue(cost, drafters)
        self._batch_s: dict[tuple[str, int], float] = {}
        self._num_rows = sum(num * (1.0 + drafter.draft_len) for drafter, num in self.drafters.values())

    def round_s(self, num_micro_batches: int, draft_len: int | None = None, limit_s: float = math.inf) -> float:
        """Expected seconds until all requests are verified once more; a lower bound of it once that is ``limit_s``.

        Args:
            draft_len: of all drafts, no longer than at present; None: as at present.
        """
        num = num_micro_batches
        num_rows = self._num_rows if draft_len is None else self._rows(draft_len)
        pass_s = self._cost.step_s(max(1, math.ceil(num_rows / num)), self.num_context // num)
        longest_s = num * pass_s
        if longest_s >= limit_s:
            return longest_s
        for name, (drafter, num_requests) in self.drafters.items():
            batch = math.ceil(num_requests / num)
            share = 1.0 if draft_len is None else _own_len(drafter, draft_len) / max(1.0, drafter.draft_len)
            draft_s = self._drafts_s(name, batch)
            reply_s = drafter.reply_s if not draft_s else share * draft_s + drafter.overhead_s
            longest_s = max(longest_s, pass_s + reply_s)
            if num > 1:
                longest_s = max(longest_s, num * share * draft_s)
        return longest_s

    def num_micro_batches(self, least: int = 1) -> int:
        """That with the most tokens per second; SPIN's search, over the cost model instead of measured throughput."""
        numbers = range(max(2, least), min(self.num_requests, MAX_MICRO_BATCHES) + 1)
        if not numbers or (least == 1 and (self.shares_device or self._barrier_is_good())):
            return least
        lens = range(1, max([1, *[round(drafter.draft_len) for drafter, _ in self.drafters.values()]]) + 1)
        tokens = {length: self._tokens(length) for length in lens}
        best, best_rate = least, 0.0
        if least == 1:
            best_rate = max(tokens[length] / self.round_s(1, length) for length in lens) / (1.0 - MICRO_BATCH_MARGIN)
        for num in numbers:
            for length in lens:
                limit_s = tokens[length] / best_rate if best_rate else math.inf
                seconds = self.round_s(num, length, limit_s)
                if seconds < limit_s:
                    best, best_rate = num, tokens[length] / seconds
        return best

    def _barrier_is_good(self) -> bool:
        """Passes over shares take together no less than one over all: overlap saves at most the wait for drafts."""
        pass_s = self._cost.step_s(max(1, math.ceil(self._num_rows)), self.num_context)
        return pass_s >= (1.0 - MICRO_BATCH_MARGIN) * self.round_s(1)

    def _drafts_s(self, name: str, batch: int) -> float:
        """Of a batch of drafts of the usual length; 0: not known."""
        found = self._batch_s.get((name, batch))
        if found is None:
            length = max(1, round(self.drafters[name][0].draft_len))
            found = self._batch_s[name, batch] = self._value.measured_s(name, batch, length)
        return found

    def _rows(self, draft_len: int) -> int:
        return sum([num * (1 + _own_len(drafter, draft_len)) for drafter, num in self.drafters.values()])

    def _tokens(self, draft_len: int) -> float:
        """Of a round of all requests."""
        pairs = self.drafters.values()
        return sum([num * expected_tokens(drafter.acceptance, _own_len(drafter, draft_len)) for drafter, num in pairs])

    @cached_property
    def _table(self) -> TableCost:
        return self._cost.table(self.num_context)

    def token_s(self, name: str, num_requests: int) -> float:
        """One token of drafts for so many; 0: not known."""
        drafter = self.drafters[name][0]
        return drafter.token_s * self._drafts_s(name, num_requests) / drafter.draft_s if drafter.draft_s else 0.0

    def barrier_rate(self, name: str, length: float) -> float:
        """Tokens per second of a request whose proposals of this length are awaited."""
        drafter, num = self.drafters[name]
        pass_s = self._table.at(num * (1 + length))
        return expected_tokens(drafter.acceptance, length) / (pass_s + length * self.token_s(name, num))

    def frontier_rate(self, name: str, length: int) -> float:
        """The same where proposals are chunks of this length, and the drafter drafts ahead of each."""
        drafter, num = self.drafters[name]
        acceptance, token_s, pass_s = drafter.acceptance, self.token_s(name, num), self._table.at(num * (1 + length))
        # Of those drafted meanwhile one is the bonus token; one more that is due soon after the pass is awaited.
        next_len = min(length, max(1, int(pass_s / token_s) - 1))
        right, next_right = acceptance ** (length + 1), acceptance ** (next_len + 1)
        share = right / (1.0 - next_right + right)  # of rounds whose proposal was drafted during the pass before
        tokens = share * expected_tokens(acceptance, next_len) + (1.0 - share) * expected_tokens(acceptance, length)
        all_right, right_s = share**num, max(pass_s, (next_len + 1) * token_s)
        num_wrong = num if all_right == 1.0 else (1.0 - share) * num / (1.0 - all_right)  # where any is
        is_idle = (length + 1) * token_s <= pass_s
        wrong_s = pass_s + (length if is_idle else length + 0.5) * self.token_s(name, max(1, math.ceil(num_wrong - 1e-9)))
        if num > 1:  # those that were right have no sooner what they draft ahead
            wrong_s = max(wrong_s, right_s)
        return tokens / (all_right * right_s + (1.0 - all_right) * wrong_s)


def _own_len(drafter: DrafterView, draft_len: int) -> int:
    return min(draft_len, max(1, round(drafter.draft_len)))


def remote_bound(draft_len: int, token_s: float, pass_s: float) -> float:
    """1 + K t_d / t_v: the most by which a drafter that never makes its target wait is faster than one that is awaited,
    with the same proposals. K tokens of ``token_s`` each, a pass of ``pass_s``."""
    return 1.0 + draft_len * token_s / pass_s
