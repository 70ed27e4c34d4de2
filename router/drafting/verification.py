"""What a verification policy knows of a pass, and what it answers; and the one that verifies everything."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

from cluster.types import record
from router.cost_model import CostModel
from router.drafting.value import DraftingValue
from router.plan import UNKNOWN_DRAFTER, Capacity, DrafterView, SequenceView

MIN_CHUNK_LEN = 16  # prompt tokens that a pass computes at any price, so that each prompt ends


@record
class PassContext:
    """The pass that is planned."""

    drafters: Mapping[str, DrafterView]
    capacity: Capacity
    cost: CostModel
    now_s: float
    num_prompt_tokens: int = 0  # that the pass may compute beside the drafts, of prompts that have begun or wait
    limit_s: float | None = None  # the longest that the pass may take by the SLOs of live requests; None: no limit
    weights: Mapping[str, float] = field(default_factory=dict)  # of a request's tokens; 1 unless it falls behind its SLO
    num_due_tokens: int = 0  # of the prompt tokens, that it must compute to meet a deadline
    tpot_s: float | None = None  # the tightest TPOT objective of the batch: AdaSpec's constraint
    num_prompt_context: int = 0  # tokens that the prompt tokens attend to: what is computed of the first of these prompts

    @property
    def value(self) -> DraftingValue:
        return DraftingValue(self.cost, self.drafters)

    @property
    def prompt_context_s(self) -> tuple[float, float]:
        """What the context of the prompt takes: of its first token in the pass, and of each one more."""
        num, num_context, cost = self.num_prompt_tokens, self.num_prompt_context, self.cost
        if not num or not num_context:
            return 0.0, 0.0
        first_s, all_s = [max(0.0, cost.prefill_s(rows, num_context) - cost.prefill_s(rows, 0)) for rows in (1, num)]
        return first_s, max(0.0, all_s - first_s) / max(1, num - 1)


@record
class PassRows:
    """The rows of a pass beside one for each decoding sequence."""

    verify_lens: Sequence[int]  # draft tokens that are verified of each of the ready sequences
    num_prompt_tokens: int  # at most


class VerificationPolicy(Protocol):
    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        """``ready``: the sequences that decode, in order of arrival. Called once for each planned pass.

        The output does not depend on the choice.
        """


@runtime_checkable
class SearchesBesidePasses(Protocol):
    """A ``VerificationPolicy`` that has something to find of a pass which that pass does not need."""

    def search(self) -> None:
        """Searches for the pass of the last ``rows``, while it runs. If this was not called, the next ``rows`` does it."""


def useful_len(sequence: SequenceView, capacity: Capacity) -> int:
    """Draft tokens that can be verified, and committed before max_tokens or the context's end; the bonus token comes after
    them."""
    room = capacity.max_model_len - sequence.committed_len
    return max(0, min(sequence.num_drafted, capacity.max_verify_len, sequence.max_new_tokens - 1, room - 1))


def survivals(ready: Sequence[SequenceView], context: PassContext) -> list[Sequence[float]]:
    """Of each sequence: the probability that each prefix of its useful draft tokens is accepted, never rising.

    Calibrated or, until that is known, a^(i+1) for token i, where a is the drafter's conditional acceptance.
    """
    capacity, max_model_len, most = context.capacity, context.capacity.max_model_len, context.capacity.max_verify_len
    found: list[Sequence[float]] = []
    for sequence in ready:
        num_useful, survival = sequence.num_drafted, sequence.survival
        is_last = num_useful >= sequence.max_new_tokens or num_useful + sequence.committed_len >= max_model_len
        if is_last or num_useful > most:
            num_useful = useful_len(sequence, capacity)
        found.append(survival if len(survival) == num_useful else _survival(sequence, num_useful, context.drafters))
    return found


def _survival(sequence: SequenceView, num_tokens: int, drafters: Mapping[str, DrafterView]) -> Sequence[float]:
    if len(sequence.survival) >= num_tokens:
        return sequence.survival[:num_tokens]
    known = drafters.get(sequence.drafter, UNKNOWN_DRAFTER) if sequence.drafter else UNKNOWN_DRAFTER
    rate = min(max(known.acceptance, 0.01), 0.99)
    return [rate ** (i + 1) for i in range(num_tokens)]


class VerifyAll:
    """Every useful draft token, in order of arrival, as far as the pass has room."""

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        num_free = context.capacity.max_pass_tokens - len(ready)
        lengths = []
        for sequence in ready:
            lengths.append(max(0, min(useful_len(sequence, context.capacity), num_free)))
            num_free -= lengths[-1]
        return PassRows(lengths, context.num_prompt_tokens)
