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
  with probability p_c = a^((c+1) B), behind such a chunk with p_m. So a share x = p_c / (1 - p_m + p_c) of rounds takes
  max(t_v, (m + 1) t) and has L(m) tokens; others take t_v + (c + 1/2) t and have L(c).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

from router.assignment import drafter_of
from router.cost_model import CostModel
from router.plan import UNKNOWN_DRAFTER, DrafterView, Frontier, SequenceView

MAX_MICRO_BATCHES = 8
MAX_CHUNK_LEN = 16
# Shares of the time that overlap must be expected to save. Simulated micro-batches fall behind the prediction by up to 0.15.
FRONTIER_MARGIN, MICRO_BATCH_MARGIN = 0.05, 0.15
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
        self._cost = cost
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
        """Of a batch of drafts; 0: not known. As measured, and by the profile for a batch of another size: while batches are
        alike, measurements say little of others."""
        found = self._batch_s.get((name, batch))
        if found is None:
            drafter, own = self.drafters[name][0], drafter_of(name)
            usual, length = max(1, round(drafter.batch)), max(1, round(drafter.draft_len))
            profiled_s = self._cost.draft_s(own, batch, length) if drafter.draft_s else None
            usual_s = self._cost.draft_s(own, usual, length) if profiled_s is not None else None
            found = drafter.draft_s * profiled_s / usual_s if profiled_s and usual_s else drafter.drafts_s(batch)
            self._batch_s[name, batch] = found
        return found

    def _rows(self, draft_len: int) -> int:
        return sum([num * (1 + _own_len(drafter, draft_len)) for drafter, num in self.drafters.values()])

    def _tokens(self, draft_len: int) -> float:
        """Of a round of all requests."""
        pairs = self.drafters.values()
        return sum([num * expected_tokens(drafter.acceptance, _own_len(drafter, draft_len)) for drafter, num in pairs])

    def frontiers(self, always: bool = False) -> dict[str, Frontier]:
        """By drafter, of those that have one."""
        found = {name: self.frontier(name, always) for name in self.drafters}
        return {name: frontier for name, frontier in found.items() if frontier is not None}

    def frontier(self, name: str, always: bool = False) -> Frontier | None:
        """The best chunk of a drafter, and how far it drafts ahead of it; None if awaiting whole proposals is faster, unless
        ``always``, or if its times are not known."""
        drafter, num_requests = self.drafters[name]
        if not always and (drafter.shares_device or drafter.acceptance ** (2 * num_requests) <= FRONTIER_MARGIN):
            return None  # since x <= p_m <= p_1, and overlap saves less than the share x of the time
        token_s = self._drafts_s(name, num_requests) / max(1.0, drafter.draft_len)
        if token_s <= 0.0:
            return None
        acceptance = drafter.acceptance
        best, best_rate, barrier_rate, best_pass_s = 0, 0.0, 0.0, 0.0
        for length in range(1, MAX_CHUNK_LEN + 1):
            tokens = expected_tokens(acceptance, length)
            pass_s = self._cost.step_s(num_requests * (1 + length), self.num_context)
            barrier_rate = max(barrier_rate, tokens / (pass_s + length * token_s))
            # One of those drafted meanwhile is the bonus token; one more that is due soon after the pass is awaited.
            next_len = min(length, max(1, int(pass_s / token_s) - 1))
            hit_s = max(pass_s, (next_len + 1) * token_s)
            hit, next_hit = (acceptance ** ((n + 1) * num_requests) for n in (length, next_len))
            share = hit / (1.0 - next_hit + hit)  # of rounds whose proposal was drafted during the pass before
            tokens += share * (expected_tokens(acceptance, next_len) - tokens)
            miss_s = pass_s + (length + 0.5) * token_s  # a correction comes in mid-token
            rate = tokens / (share * hit_s + (1.0 - share) * miss_s)
            if rate > best_rate:
                best, best_rate, best_pass_s = length, rate, pass_s
        if not best or (not always and best_rate * (1.0 - FRONTIER_MARGIN) <= barrier_rate):
            return None
        return Frontier(best, min(MAX_CHUNK_LEN, max(best + 1, math.ceil(best_pass_s / token_s))))


def _own_len(drafter: DrafterView, draft_len: int) -> int:
    return min(draft_len, max(1, round(drafter.draft_len)))


def expected_tokens(acceptance: float, draft_len: int) -> float:
    """L(c) = (1 - a^(c+1)) / (1 - a)."""
    if acceptance >= 1.0:
        return draft_len + 1.0
    return float((1.0 - acceptance ** (draft_len + 1)) / (1.0 - acceptance))


def remote_bound(draft_len: int, token_s: float, pass_s: float) -> float:
    """1 + K t_d / t_v: the most by which a drafter that never makes its target wait is faster than one that is awaited,
    with the same proposals. K tokens of ``token_s`` each, a pass of ``pass_s``."""
    return 1.0 + draft_len * token_s / pass_s
