"""The planner's input and output: views of sequences and drafters, and the StepPlan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from cluster.types import MAX_DRAFT_LEN, TokenLogprobs, record


@record
class SloProgress:
    """Service-level objectives of a live request, and how far it is. Times are on the target's clock."""

    first_due_s: float | None  # when its first token must be there; None: no objective, or it is there
    tpot_s: float | None  # mean time per token after the first; None: no objective
    first_token_s: float | None = None  # None: not there yet
    num_tokens: int = 0  # of its output


@record
class SequenceView:
    """One live request as the planner sees it.

    Of the ``committed_len`` tokens (prompt included) the target has computed ``computed_len``: at least one less, for
    the last committed token is computed together with the draft tokens that follow it.

        0 ........ computed_len ........ committed_len ........ + num_drafted
        | in the cache | to be computed  | proposed, unverified |
    """

    request_id: str
    committed_len: int
    computed_len: int
    num_drafted: int  # tokens of the current proposal
    running: bool  # holds blocks; a waiting one must be admitted first
    drafter: str | None  # of the current or awaited proposal; None: plain decoding
    awaiting_since_s: float | None  # when the drafter was sent the newest commit; None: no proposal is awaited
    max_new_tokens: int  # committed tokens that may still come, at least 1
    survival: tuple[float, ...] = ()  # calibrated probability that each prefix of the proposal is right; (): not known yet
    committed_s: float = 0.0  # when its drafter was last sent a commit
    arrived_s: float = 0.0  # at the target
    slo: SloProgress | None = None  # None: best effort
    cached_len: int = 0  # of a waiting one: its first tokens that the prefix cache held when it was asked last

    @property
    def num_left(self) -> int:
        """Tokens that it must compute until its next one is chosen."""
        return self.committed_len - self.computed_len - self.cached_len

    @property
    def waits_since_s(self) -> float | None:
        """As ``awaiting_since_s``; None also if it has drafts, or could use none."""
        return None if self.num_drafted or self.max_new_tokens == 1 else self.awaiting_since_s


@record
class Frontier:
    """A drafter proposes chunks of ``chunk_len`` tokens, and drafts ahead while a chunk is verified (FASER)."""

    chunk_len: int

    @property
    def ahead_len(self) -> int:
        """Tokens drafted ahead: the bonus token and the next chunk. A correction would have to wait for more."""
        return self.chunk_len + 1


@record
class DrafterView:
    """Running means over a drafter's proposals to this target."""

    reply_s: float  # from a commit to the proposal that answers it
    accepted_per_round: float  # draft tokens accepted of a proposal that is waited for, without the bonus token
    acceptance: float  # of a draft token, given that those before it were accepted
    exposure: float = 1.0  # share of its proposals that the target waited for
    draft_s: float = 0.0  # of a batch of drafts for ``batch`` requests, of ``draft_len`` tokens each; 0: not known
    batch: float = 1.0
    request_s: float = 0.0  # that one request more adds to a batch
    draft_len: float = 0.0
    token_s: float = 0.0  # of one token of such a batch, which stays right when lengths change; 0: not known
    shares_device: bool = False  # with the target: its drafts and passes slow each other
    transit_s: float | None = None  # of a reply beside its draft, where none waits for another; None: not known

    def drafts_s(self, num_requests: int) -> float:
        """A batch of drafts for so many requests; 0: not known."""
        return max(0.0, self.draft_s + self.request_s * (num_requests - self.batch)) if self.draft_s else 0.0

    @property
    def overhead_s(self) -> float:
        """Of a reply, beside its draft."""
        return max(0.0, self.reply_s - self.draft_s) if self.transit_s is None else self.transit_s


# Assumed of a drafter before its first proposal: worth a short wait.
UNKNOWN_DRAFTER = DrafterView(reply_s=0.0, accepted_per_round=1.0, acceptance=0.6)


@record
class Capacity:
    """What the target can hold. Block counts are of the KV cache."""

    block_len: int
    num_blocks: int
    num_free_blocks: int  # cached blocks that no sequence uses included
    max_num_sequences: int
    max_pass_tokens: int
    max_model_len: int
    prepared_rows: tuple[int, ...] = ()  # shapes that are captured, ascending: a smaller pass is padded to the next
    max_verify_len: int = MAX_DRAFT_LEN  # draft tokens of one sequence in a pass


@dataclass(slots=True)
class Span:
    """What one request does in one pass, from the plan to the outcome. The planner sets the two numbers, the round the
    tokens, and the engine what it chose.

        base_len .............. + num_compute ............ + num_drafts
        | committed tokens      | draft tokens to verify   |  = token_ids
    """

    request_id: str
    num_compute: int  # committed tokens from computed_len on; of a request that starts to run, behind those that are cached
    num_drafts: int = 0  # 0 unless the committed tokens are computed to the last one

    base_len: int = 0
    token_ids: tuple[int, ...] = ()
    samples: bool = True  # a token is chosen at each of the last num_drafts + 1 rows; False: a chunk of a prompt

    chosen: tuple[int, ...] = ()  # accepted draft tokens, then the target's next one; () if nothing was chosen
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the chosen tokens, if requested
    error: str | None = None  # no token could be chosen (the logits are NaN, say): the request ends
    is_refused: bool = False  # the error is the request's own doing, which masks all tokens
    computed_len: int | None = None  # in the cache after a pass that chose nothing; None: all of the span was computed
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of consecutive prompt tokens, from position ``scored_from`` on
    scored_from: int = 1

    @classmethod
    def bound(
        cls, request_id: str, base_len: int, token_ids: tuple[int, ...], num_drafts: int = 0, samples: bool = True
    ) -> Self:
        """A span that was not planned, of these tokens."""
        return cls(request_id, len(token_ids) - num_drafts, num_drafts, base_len, token_ids, samples)

    def take(self, outcome: "Span") -> None:
        """The tokens chosen, as of another span."""
        self.chosen, self.num_accepted, self.logprobs = outcome.chosen, outcome.num_accepted, outcome.logprobs
        self.error, self.is_refused = outcome.error, outcome.is_refused

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[self.num_compute :]


@record
class PromptRows:
    """Prompt tokens that can be computed in this pass and in the one after it, however many requests decode in them."""

    now: int = 0
    next: int = 0


NO_PROMPTS = PromptRows()


@record
class StepPlan:
    """The next target pass, and who waits for the one after it."""

    spans: tuple[Span, ...]  # in the order of the batch
    admitted: tuple[str, ...] = ()  # waiting requests that start to run, in spans too
    preempted: tuple[str, ...] = ()  # running requests that give up their blocks, to be computed again later
    held: Mapping[str, float] = field(default_factory=dict)  # request -> when it stops waiting for its proposal
    wake_s: float | None = None  # when to plan again if no mail comes; None unless every request is held
    frontiers: Mapping[str, Frontier] = field(default_factory=dict)  # drafter -> it drafts ahead; others do not
    num_micro_batches: int = 1  # that requests are verified in, in turn
    num_prompt_tokens_left: int = 0  # of prompts for which there are places, after the pass
    best_left_out: float = 0.0  # greatest known survival of a draft token that the pass does not verify; 0: of none

    @property
    def is_empty(self) -> bool:
        return not self.spans and not self.preempted
