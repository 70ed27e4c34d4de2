"""Service-level objectives in a round: the longest pass, requests that fall behind, and what deadlines need of prompts.

A request with the TPOT objective tau that has n tokens, the first of them since e seconds, is *ahead* of its objective by
a = tau (n - 1) - e seconds:

    first token ............... now ............. first token + tau n
    |            e              |     tau + a     |
                                  the next token is due in tau + a

- While it is ahead, one pass may use half of what it is ahead, beside tau. Else a pass takes at most tau, as in AdaSpec
  (section 5.3): it may commit a single token. Prompts give way before drafts: of tau + a / 2 they get what plain decoding
  leaves.
- An objective that even passes without drafts and prompts would miss limits none: only drafts can meet it.
- Its first tokens may be late: what plain decoding of the rest of them regains counts as ahead. Else no prompt could join a
  pass with a request that has just begun.
- Where drafts compete for rows, in verification and in the row price that its drafter is told, a request weighs as much as
  it must be faster than plain decoding to be on time in 16 tokens.
- A round that awaits drafts may take tau for each token that it is expected to commit, and half of what the request is ahead
  (`router/drafting/length_rule.py`).
- An objective that can no longer be met does not count, so that it costs others nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from router.cost_model import CostModel
from router.plan import SequenceView

AHEAD_SHARE = 0.5  # of the time that a request is ahead or behind, which one pass may use or must make up for
MAX_AHEAD_TOKENS = 16.0  # tokens' worth of time ahead that counts: streams must not stall
MAX_WEIGHT = 4.0
CATCH_UP_TOKENS = 16.0  # in which a request that is behind should be on time again
LATE_TOKENS = 32  # first tokens of an answer, which may be late as far as plain decoding of the rest of them regains it
BEST_EFFORT_TTFT_S = 10.0  # orders prompts without a deadline, or with a missed one, among the others: none starves
TTFT_SHARE = 0.8  # of the time until a first token is due, within which it is planned: the rest is for what costs ignore
MAX_DEADLINES = 32  # prompts whose deadlines a round looks at, the earliest first


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What the objectives of live requests leave the next pass."""

    limit_s: float | None = None  # of the whole pass; None: any time
    chunk_s: float = inf  # that prompt tokens may add
    num_due_tokens: int = 0  # prompt tokens that the pass must compute, or a deadline is missed
    weights: Mapping[str, float] = field(default_factory=dict)  # request -> above 1: it falls behind
    tpot_s: float | None = None  # the tightest objective of decoding requests
    streams: tuple["Stream", ...] = ()  # decoding requests whose objective limits rounds

    def of_pass(self) -> tuple[float | None, Mapping[str, float], int, float | None]:
        """Fields of a `PassContext`, from ``limit_s`` on."""
        return self.limit_s, self.weights, self.num_due_tokens, self.tpot_s


@dataclass(frozen=True, slots=True)
class Stream:
    """A decoding request with a TPOT objective that plain decoding would meet."""

    request_id: str
    tpot_s: float
    usable_s: float  # that one round may take beside the objective; negative: it is behind

    def round_s(self, num_tokens: float) -> float:
        """The longest round that commits so many tokens of it."""
        return self.tpot_s * num_tokens + max(0.0, self.usable_s)


NO_LIMITS = RoundLimits()


def round_limits(
    decoding: Sequence[SequenceView],
    prompts: Sequence[SequenceView],
    cost: CostModel,
    now_s: float,
    num_draft_tokens: int | None = None,
) -> RoundLimits:
    """Of the next pass.

    Args:
        decoding: requests that wait for a token; a pass without them delays them too.
        prompts: in the order of `by_deadline`.
        num_draft_tokens: that later passes verify; None: all that are proposed now.
    """
    if num_draft_tokens is None:
        num_draft_tokens = sum([s.num_drafted for s in decoding])
    plain_s = full_s = 0.0
    if decoding:
        num_attended = sum([s.committed_len for s in decoding])
        plain_s = cost.step_s(len(decoding), num_attended)
        full_s = cost.step_s(len(decoding) + num_draft_tokens, num_attended)
    limit_s = with_chunk_s = least_tpot_s = inf
    weights: dict[str, float] = {}
    streams: list[Stream] = []
    for sequence in decoding:
        slo = sequence.slo
        if slo is None or slo.tpot_s is None or slo.first_token_s is None:
            continue
        tpot_s, elapsed_s = slo.tpot_s, now_s - slo.first_token_s
        least_tpot_s = min(least_tpot_s, tpot_s)
        ahead_s = tpot_s * (slo.num_tokens - 1) - elapsed_s
        if ahead_s + tpot_s * sequence.max_new_tokens < 0.0:
            continue  # missed, whatever comes
        if tpot_s >= plain_s:
            num_regaining = max(0, min(LATE_TOKENS - slo.num_tokens, sequence.max_new_tokens - 1))
            usable_s = ahead_s + num_regaining * (tpot_s - plain_s)
            usable_s = AHEAD_SHARE * min(usable_s, MAX_AHEAD_TOKENS * tpot_s)
            stream = Stream(sequence.request_id, tpot_s, usable_s)
            streams.append(stream)
            limit_s = min(limit_s, stream.round_s(1.0))
            with_chunk_s = min(with_chunk_s, tpot_s + usable_s)
        needed_s = tpot_s + ahead_s / CATCH_UP_TOKENS
        if needed_s < plain_s:
            weights[sequence.request_id] = min(MAX_WEIGHT, plain_s / needed_s) if needed_s > 0.0 else MAX_WEIGHT
    chunk_s, num_due = max(0.0, with_chunk_s - plain_s), 0
    for num_tokens, spare_s, prompts_s in _deadlines(prompts, plain_s, cost, now_s):
        if spare_s < full_s:  # one pass is left, with few drafts
            num_due, limit_s = max(num_due, num_tokens), min(limit_s, spare_s + prompts_s)
        elif full_s > 0.0:
            num_due = max(num_due, ceil(num_tokens / (spare_s // full_s)))
    return RoundLimits(_known(limit_s), chunk_s, num_due, weights, _known(least_tpot_s), tuple(streams))


def _known(seconds: float) -> float | None:
    return None if seconds == inf else seconds


def _deadlines(
    prompts: Sequence[SequenceView], plain_s: float, cost: CostModel, now_s: float
) -> Iterable[tuple[int, float, float]]:
    """Those that can be met: prompt tokens to compute until then, the seconds that remain for everything else, and the
    seconds of these tokens."""
    num_tokens, base_s, attention_s = 0, cost.prefill_s(1, 0), 0.0
    for sequence in prompts[:MAX_DEADLINES]:
        num_own, num_before = sequence.num_left, sequence.computed_len + sequence.cached_len
        num_tokens += num_own
        if num_before:  # its rows attend to what is computed of it
            long_s = cost.prefill_s(num_own, num_before) - cost.prefill_s(1, num_before)
            attention_s += long_s - (cost.prefill_s(num_own, 0) - base_s)
        if sequence.slo is None or sequence.slo.first_due_s is None:
            continue
        left_s = sequence.slo.first_due_s - now_s
        prompts_s = cost.prefill_s(num_tokens, 0) - base_s + attention_s
        if left_s - prompts_s >= plain_s:
            yield num_tokens, max(plain_s, TTFT_SHARE * left_s - prompts_s), prompts_s


def by_deadline(prompts: Iterable[SequenceView], now_s: float) -> list[SequenceView]:
    """Earliest deadline first. Others count as due BEST_EFFORT_TTFT_S after they came, so that each is overtaken only by
    requests that come within that time of it."""

    def due_s(sequence: SequenceView) -> float:
        slo = sequence.slo
        if slo is not None:
            if slo.first_token_s is not None:  # preempted
                return sequence.arrived_s
            if slo.first_due_s is not None and slo.first_due_s >= now_s:
                return slo.first_due_s
        return sequence.arrived_s + BEST_EFFORT_TTFT_S

    return sorted(prompts, key=due_s)
