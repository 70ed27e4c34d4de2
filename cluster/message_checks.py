"""Validation of received messages: values against each other, the vocabulary and limits. Later code relies on it.

The codec checks types and sampling parameters; the owner of a request's state checks consistency with it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, isnan
from typing import Any, TypeVar

from cluster.messages import (
    Budget,
    CommitRound,
    DraftRound,
    DraftScore,
    DraftTiming,
    Extend,
    LevelReport,
    Message,
    Open,
    OutcomeReport,
    ProposalRound,
    SubmitRound,
)
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Link
from cluster.types import MAX_DRAFT_LEN, Commit, FinishReason, Proposal, Request

logger = logging.getLogger(__name__)

MAX_ID_LEN = 256  # characters of a request id or a drafter's name
MAX_PROPOSERS = 8  # drafters of a chain
MAX_SALT_LEN = 64  # characters
MAX_TRACE_LEN = 55  # characters of a traceparent
MAX_COUNT = 2**24  # passes, rows or tokens per report; bounds a report's weight in the estimates
MAX_REPORT_S = 3600.0
MAX_UNSOUND = 16  # invalid messages after which a link is closed

M = TypeVar("M", bound=Message)


class Inspection:
    """Drops, counts and logs invalid parts of the messages that ``reader`` receives. Not thread-safe."""

    def __init__(self, reader: str) -> None:
        self.num_unsound = 0  # of all links
        self._reader = reader
        self._counts: dict[Link, int] = {}

    def sound_part(self, link: Link, message: M, vocab_size: int) -> M:
        """The message without its invalid parts; the same object if there are none."""
        sound, faults = sound_part(message, vocab_size)
        if faults:
            self.note(link, faults)
        return sound

    def note(self, link: Link, faults: Sequence[str]) -> None:
        """Records an invalid message."""
        self.num_unsound += 1
        self._counts[link] = self._counts.get(link, 0) + 1
        peer = f"{link.peer.role} {link.peer.name!r}"
        logger.warning("%s: dropped %d parts of a message from %s: %s", self._reader, len(faults), peer, faults[0])

    def must_go(self, link: Link) -> bool:
        """Whether the link has carried MAX_UNSOUND invalid messages: its owner should close it."""
        return self._counts.get(link, 0) >= MAX_UNSOUND

    def forget(self, link: Link) -> None:
        """Removes the link's count."""
        self._counts.pop(link, None)


def sound_part(message: M, vocab_size: int) -> tuple[M, list[str]]:
    """The message without its invalid parts, the same object if there are none, and what is wrong with those."""
    faults: list[str] = []
    sound: dict[str, Any] = {}
    for name, fault_of in _CHECKS[type(message)]:
        parts = getattr(message, name)
        if parts:
            found = [fault_of(part, vocab_size) for part in parts]
            if any(found):
                faults.extend(fault for fault in found if fault)
                sound[name] = tuple(part for part, fault in zip(parts, found, strict=True) if fault is None)
    return (replace(message, **sound) if faults else message), faults


def proposal_fault(proposal: Proposal, vocab_size: int) -> str | None:
    """What is invalid; None: nothing."""
    token_ids, confidences = proposal.token_ids, proposal.confidences
    if len(token_ids) > MAX_DRAFT_LEN or len(confidences) != len(token_ids):
        return f"a proposal of {len(token_ids)} tokens (at most {MAX_DRAFT_LEN}) with {len(confidences)} confidences"
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    if unknown:
        return f"a proposal of tokens outside the vocabulary of {vocab_size}: {unknown[0]}"
    if [one for one in confidences if not 0.0 <= one <= 1.0]:  # NaN, too
        return f"a proposal of confidences that are not between 0 and 1: {confidences}"
    return id_fault(proposal.request_id) or (f"a base length of {proposal.base_len}" if proposal.base_len < 0 else None)


def score_fault(score: DraftScore) -> str | None:
    num_scored, num_matched = score.num_scored, score.num_matched
    if not (0 <= num_matched <= num_scored <= num_matched + 1 and num_scored <= MAX_DRAFT_LEN and score.base_len >= 0):
        return f"a score of {num_matched} matches of {num_scored} tokens, at most {MAX_DRAFT_LEN}"
    return id_fault(score.request_id)


def level_fault(report: LevelReport) -> str | None:
    if not all(0 <= count <= MAX_COUNT for count in (report.num_passes, report.num_rows, report.num_lost)):
        return f"a level report of {report.num_passes} passes, {report.num_rows} rows, {report.num_lost} lost requests"
    if not 0.0 <= report.busy_s <= MAX_REPORT_S:
        return f"a level report of {report.busy_s} busy seconds, at most {MAX_REPORT_S:g}"
    for verified in report.verified:
        reached, right = verified.num_reached, verified.num_right
        falls = all(later <= earlier for earlier, later in zip(right, reached[1:], strict=False))
        fits = len(right) == len(reached) <= MAX_DRAFT_LEN
        if not (fits and falls and all(0 <= n <= m <= MAX_COUNT for n, m in zip(right, reached, strict=True))):
            return f"a level report of positions reached {reached[:8]} times and right {right[:8]} times"
        if not 0 <= verified.num_proposed <= verified.num_asked <= MAX_COUNT:
            return f"a level report of {verified.num_proposed} tokens proposed of {verified.num_asked} asked for"
        if not 0.0 <= verified.overlap <= verified.num_compared <= MAX_COUNT:
            return f"a level report of {verified.num_compared} tokens compared with an overlap of {verified.overlap}"
    return _names_fault((report.drafter, *(verified.proposer for verified in report.verified)))


def open_fault(opening: Open, vocab_size: int) -> str | None:
    length, end_len = len(opening.token_ids), opening.prompt_len + opening.sampling.max_tokens
    if not 1 <= opening.prompt_len <= length <= end_len:
        return f"an opening of {length} tokens, of which {opening.prompt_len} are the prompt, up to {end_len}"
    if not _known(opening.token_ids, vocab_size):
        return f"an opening with tokens outside the vocabulary of {vocab_size}"
    if len(opening.proposers) > MAX_PROPOSERS:
        return f"an opening with {len(opening.proposers)} proposers, at most {MAX_PROPOSERS}"
    named = id_fault(opening.request_id) or _names_fault(opening.proposers) or _text_fault(opening)
    return named or sampling_fault(opening.sampling, vocab_size)


def budget_fault(budget: Budget) -> str | None:
    terms = budget.terms
    shares = terms.row_price, terms.min_confidence, terms.expected_confidence or 0.0
    if not all(0.0 <= share <= 1.0 for share in shares) or not 0.0 <= terms.second_price < inf:
        return f"a budget with {terms}: confidences and row prices are from 0 to 1, other prices at least 0"
    if not (0 <= terms.num_tokens <= MAX_DRAFT_LEN and 0 <= terms.ahead_len <= MAX_DRAFT_LEN):
        return f"a budget of {terms.num_tokens} tokens and {terms.ahead_len} ahead, at most {MAX_DRAFT_LEN}"
    return id_fault(budget.request_id)


def timing_fault(timing: DraftTiming) -> str | None:
    if 1 <= timing.num_requests <= MAX_COUNT and 0.0 < timing.seconds <= MAX_REPORT_S >= timing.waited_s >= 0.0:
        return None
    return f"a batch of drafts for {timing.num_requests} requests in {timing.seconds} s after {timing.waited_s} s"


def outcome_fault(report: OutcomeReport) -> str | None:
    if 0 <= report.num_own + report.num_hits <= report.num_commits <= MAX_COUNT and report.num_prepared <= MAX_COUNT:
        return None
    return f"a report of {report.num_own} and {report.num_hits} outcomes prepared of {report.num_commits} commits"


def extend_fault(extension: Extend, vocab_size: int) -> str | None:
    if extension.base_len < 1 or not _known(extension.token_ids, vocab_size):
        return f"an extension at {extension.base_len} by tokens of which some are outside the vocabulary of {vocab_size}"
    return id_fault(extension.request_id)


def commit_fault(commit: Commit, vocab_size: int) -> str | None:
    if commit.base_len < 0 or not 0 <= commit.num_accepted <= commit.num_proposed:
        return f"a commit at {commit.base_len} of {commit.num_accepted} accepted of {commit.num_proposed} tokens"
    if not _known(commit.token_ids, vocab_size):
        return f"a commit of tokens outside the vocabulary of {vocab_size}"
    if commit.prefill is not None and not all(isfinite(time) for time in (commit.prefill.queue_s, commit.prefill.prefill_s)):
        return f"a commit with {commit.prefill.queue_s} seconds in the queue and {commit.prefill.prefill_s} of prefill"
    if commit.prefill is not None and not 0 <= commit.prefill.num_cached_tokens <= commit.base_len:
        return f"a commit at {commit.base_len} with {commit.prefill.num_cached_tokens} cached tokens"
    if not commit.token_ids and commit.finish is None and not commit.prompt_logprobs:
        return "a commit of nothing"
    if commit.logprobs or commit.prompt_logprobs:
        logprobs = (*commit.logprobs, *commit.prompt_logprobs)
        tops = [top for one in logprobs for top in one.top]
        values = (*(one.logprob for one in logprobs), *(value for _, value in tops))
        if len(commit.logprobs) not in (0, len(commit.token_ids)) or any(isnan(value) for value in values):
            return f"a commit of {len(commit.token_ids)} tokens with {len(commit.logprobs)} log-probabilities"
        if not _known([token for token, _ in tops], vocab_size):
            return f"log-probabilities of tokens outside the vocabulary of {vocab_size}"
    if commit.error is None and commit.finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
        return f"a commit that ends with {commit.finish} and no reason"
    return None


def request_fault(request: Request, vocab_size: int) -> str | None:
    """Of a request with a valid id: values that a target cannot process."""
    if not _known(request.prompt_token_ids, vocab_size):
        return f"a prompt token lies outside the vocabulary of {vocab_size}"
    if not _known(request.output_token_ids, vocab_size):
        return f"an output token lies outside the vocabulary of {vocab_size}"
    if not _known(request.prediction_token_ids, vocab_size):
        return f"a predicted token lies outside the vocabulary of {vocab_size}"
    ttft_s, tpot_s = request.slo.ttft_s, request.slo.tpot_s
    if not all(isfinite(time) for time in (request.arrival_s, ttft_s or 0.0, tpot_s or 0.0)):
        return "its arrival and objectives must be finite numbers of seconds"
    if (ttft_s is not None and ttft_s < 0.0) or (tpot_s is not None and tpot_s <= 0.0):
        return f"its objectives of {ttft_s} and {tpot_s} seconds must be greater than 0"
    if request.chain is not None and len(request.chain) > MAX_PROPOSERS:
        return f"its chain names {len(request.chain)} drafters, at most {MAX_PROPOSERS} are possible"
    names = (*(request.chain or ()), *(() if request.slo.name is None else (request.slo.name,)))
    return _names_fault(names) or _text_fault(request) or sampling_fault(request.sampling, vocab_size)


def sampling_fault(sampling: SamplingParams, vocab_size: int) -> str | None:
    wrong = next((name for name, token_ids in sampling.token_ids().items() if not _known(token_ids, vocab_size)), None)
    return f"a token of {wrong} lies outside the vocabulary of {vocab_size}" if wrong else None


def id_fault(request_id: str) -> str | None:
    if not 0 < len(request_id) <= MAX_ID_LEN:
        return f"a request id of {len(request_id)} characters, 1 to {MAX_ID_LEN} are possible"
    return None


def _text_fault(one: Open | Request) -> str | None:
    salt = one.salt if isinstance(one, Request) else one.cache_salt
    if len(salt) > MAX_SALT_LEN:
        return f"a cache salt of {len(salt)} characters, at most {MAX_SALT_LEN}"
    return f"a trace of {len(one.trace)} characters, at most {MAX_TRACE_LEN}" if len(one.trace) > MAX_TRACE_LEN else None


def _names_fault(names: Iterable[str]) -> str | None:
    if not all(0 < len(name) <= MAX_ID_LEN for name in names):
        return f"the name of a drafter or class that has not 1 to {MAX_ID_LEN} characters"
    return None


def _known(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


# By message: of each field, what is wrong with one of its parts.
_CHECKS: Mapping[type, Sequence[tuple[str, Callable[[Any, int], str | None]]]] = {
    ProposalRound: (
        ("proposals", proposal_fault),
        ("scores", lambda score, vocab_size: score_fault(score)),
        ("resyncs", lambda request_id, vocab_size: id_fault(request_id)),
        ("levels", lambda level, vocab_size: level_fault(level)),
        ("timings", lambda timing, vocab_size: timing_fault(timing)),
        ("outcomes", lambda report, vocab_size: outcome_fault(report)),
    ),
    DraftRound: (
        ("opens", open_fault),
        ("extends", extend_fault),
        ("budgets", lambda budget, vocab_size: budget_fault(budget)),
        ("releases", lambda request_id, vocab_size: id_fault(request_id)),
    ),
    SubmitRound: (  # what else is wrong with a request is told to its caller (`request_fault`)
        ("submits", lambda request, vocab_size: id_fault(request.id)),
        ("aborts", lambda request_id, vocab_size: id_fault(request_id)),
    ),
    CommitRound: (("commits", commit_fault),),
}
