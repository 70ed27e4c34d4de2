"""Whether a draft goes on: decided by the drafter after each draft step of a batch, by the terms that the target sent.

Prices are in tokens. All requests of a batch wait for its last step, so a step is chosen for the batch:

- By price: another token is drafted where it is likely enough to survive, if these tokens gain more than what all requests
  could be decoded meanwhile: sum over i of max(0, s_i c - row price) >= t sum over j of (tokens per second of j), where s_i
  is the calibrated survival of the draft, c the usual survival of a next token and t the time of a step. Gains fall from
  step to step, so the first step that does not pay is the best end.
- By throughput (``DraftTerms.expected_confidence``): AdaSpec, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types import DraftTerms


@dataclass(slots=True)
class DraftProgress:
    """A draft of a batch as it grows; with at least one token."""

    terms: DraftTerms
    survival: float  # of all its tokens, calibrated
    confidence: float  # of the last one, as given
    given_survival: float  # of all its tokens, by the given confidences
    expected_len: float  # accepted tokens, by the given confidences
    num_tokens: int
    is_open: bool  # more tokens are wanted


def continuing(batch: Sequence[DraftProgress], step_s: float, num_steps: int, next_confidence: float) -> list[bool]:
    """Which drafts of a batch get one more token.

    Args:
        step_s: time of one more step.
        num_steps: so far.
        next_confidence: usual probability that a draft token is right if those before it are.
    """
    is_open = [one.is_open and one.confidence >= one.terms.min_confidence for one in batch]
    if batch and batch[0].terms.expected_confidence is not None:
        goes_on = _raises_throughput(batch, is_open, step_s, num_steps, batch[0].terms.expected_confidence)
        return [one and goes_on for one in is_open]
    wait_price = step_s * sum([one.terms.second_price for one in batch])
    gain, found = 0.0, []
    for one, wanted in zip(batch, is_open, strict=True):
        survival = one.survival * next_confidence
        wanted = wanted and survival >= one.terms.least_survival
        found.append(wanted)
        if wanted and survival > one.terms.row_price:
            gain += survival - one.terms.row_price
    return found if gain >= wait_price else [False] * len(found)


def _raises_throughput(
    batch: Sequence[DraftProgress], is_open: Sequence[bool], step_s: float, num_steps: int, expected_confidence: float
) -> bool:
    """AdaSpec, algorithm 1: whether the predicted throughput of the batch with one more step exceeds that without it.

    Throughput (8) is accepted tokens (6) over time (1), with the bonus tokens. Time is in tokens of plain decoding, so that
    a pass without drafts takes one per request. Line 19 of the algorithm takes the expected confidence alone as acceptance
    of the next token; by (7) it is the product with those before, as here.
    """
    step_price = step_s * sum([one.terms.second_price for one in batch])
    tokens = len(batch) + sum([one.expected_len for one in batch])
    time = len(batch) + num_steps * step_price + sum([one.num_tokens * one.terms.row_price for one in batch])
    live = [one for one, wanted in zip(batch, is_open, strict=True) if wanted]
    more_tokens = sum([one.given_survival * expected_confidence for one in live])
    more_time = step_price + sum([one.terms.row_price for one in live])
    return bool(live) and (tokens + more_tokens) * time > tokens * (time + more_time)
