"""The words of the domain: what a caller asks for, what a drafter proposes, what a target commits.

Positions are absolute: position ``t`` holds token ``token_ids[t]`` of prompt followed by output. A *committed length* counts
the tokens, prompt included, that are final. Lengths that include the bonus token say so.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.errors import InvalidField
from cluster.records import record

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_DRAFT_LEN = 64  # tokens of one proposal
MAX_ALLOWED_TOKENS = 4096
DICTATING_BIAS = 20.0  # nats: more than any target's logits differ among the tokens that it would really say


def _fresh_seed() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; with the target and the prompt it determines the output (DESIGN idea 1).

    Penalties follow the OpenAI API (presence, frequency: over generated tokens) and Hugging Face (repetition: over prompt
    and generated tokens). They, the bias, temperature, top-k, top-p and min-p are applied in that order.

    Raises:
        InvalidField: a value lies outside its range; names the field.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()  # matched on text, by whoever detokenizes
    stop_token_ids: tuple[int, ...] = ()  # matched by the round; the token itself is committed
    min_tokens: int = 0  # stop tokens and the end of sequence cannot be chosen before
    ignore_eos: bool = False
    seed: int = field(default_factory=_fresh_seed)  # of the noise; the same seed repeats it
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the chosen token alone
    allowed_token_ids: tuple[int, ...] = ()  # only these can be chosen; (): every token can

    @property
    def dictates(self) -> bool:
        """Whether the caller all but names the tokens, whatever the target would say."""
        return bool(self.allowed_token_ids) or any(bias >= DICTATING_BIAS for _, bias in self.logit_bias)

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("temperature", self.temperature, 0.0, 2.0)
        if self.top_k is not None:
            _within("top_k", self.top_k, 1, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidField("top_p", self.top_p, "must be greater than 0 and at most 1")
        _within("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise InvalidField("repetition_penalty", self.repetition_penalty, "must be greater than 0 and at most 10")
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidField("logit_bias", len(self.logit_bias), f"must have at most {MAX_LOGIT_BIAS} entries")
        for _, bias in self.logit_bias:
            _within("logit_bias", bias, -100.0, 100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidField("stop", len(self.stop), f"must have at most {MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop):
            raise InvalidField("stop", "", "must not hold an empty string")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidField("min_tokens", self.min_tokens, f"must lie between 0 and max_tokens ({self.max_tokens})")
        _within("seed", self.seed, 0, MAX_SEED)
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise InvalidField(
                "allowed_token_ids", len(self.allowed_token_ids), f"must have at most {MAX_ALLOWED_TOKENS} tokens"
            )
        if self.top_logprobs is not None:
            _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def has_penalties(self) -> bool:
        """Whether the choice at a position depends on the tokens before it other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits of single tokens are changed before temperature and filters, ``min_tokens`` apart."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.allowed_token_ids)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN, too
        raise InvalidField(name, value, f"must lie between {low} and {high}")


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective of a request. None: no promise."""

    ttft_s: float | None = None  # time to first token
    tpot_s: float | None = None  # time per output token after the first


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to complete. ``n`` choices of an API call are n requests with seeds of their own.

    ``chain`` fixes the drafters, nearest to the target last: None lets the router choose, () asks for the target alone.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    slo: Slo = Slo()
    chain: tuple[str, ...] | None = None

    @property
    def teaches(self) -> bool:
        """Whether what becomes of drafts for it says anything of the drafters: not of one that wants the target alone, or
        whose tokens the caller dictates. Whoever learns of drafters leaves the others out."""
        return self.chain != () and not self.sampling.dictates


@record
class Proposal:
    """Draft tokens that extend the first ``base_len`` committed tokens of a request.

    One that comes late is cut to what is still ahead, if what was committed meanwhile agrees with it; else it is dropped.

    ``confidences[i]`` is the drafter's own probability that token i is the target's, given that those before it are.
    ``unfinished``: the drafter would have said more, had it been asked for more or had the time.
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    drafter: str
    unfinished: bool = False


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the model's context
    ABORT = "abort"
    ERROR = "error"  # the engine failed on this request; Commit.error says why
    OVERLOADED = "overloaded"  # refused: too many requests wait


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the target's raw distribution (before penalties, bias and temperature)."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most probable first


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a request's prompt was computed. Times are durations on the target's clock, in seconds."""

    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_s: float  # from the request's arrival at the target to its first pass
    prefill_s: float  # from its first pass to its first token


@record
class Commit:
    """Tokens that became final in one round: the accepted draft tokens, then the bonus token.

    ``num_accepted`` of ``num_proposed`` verified draft tokens were right; ``drafter`` is whose proposal was at hand, be it
    empty or not verified at all. ``len(token_ids)`` is the accepted length
    with the bonus token, or less where the sequence ended inside it. ERROR and OVERLOADED carry their reason in ``error``.
    ``prefill`` comes with the first tokens of a request.
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_proposed: int = 0
    num_accepted: int = 0
    drafter: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    prefill: Prefill | None = None


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """What the router decided, published every slot; the round reads the newest (DESIGN idea 2).

    A chain names pool members, nearest to the target last; () is the target alone. ``defaults`` serve requests that
    the router has not seen yet, round-robin. ``scorers`` keep in step, in their spare time, with requests that others draft
    for (SPIN's fast switching), and report how they would have done.
    """

    version: int
    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: tuple[tuple[str, ...], ...] = ((),)
    scorers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What everybody must know of the served model."""

    name: str
    vocab_size: int
    max_model_len: int  # prompt and output together
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str  # equal fingerprints: the same token ids mean the same text
