"""Requests, proposals, commits and the routing table.

Position ``t`` counts from the prompt's first token. A *committed length* counts all final tokens, including the prompt.
Lengths that include the bonus token say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar, dataclass_transform

from cluster.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """As ``dataclass(frozen=True, slots=True)``, with a third of its construction time."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


MAX_DRAFT_LEN = 64  # tokens of one proposal
PRICE_SHARE = 0.5  # of a row price, below which nothing is drafted: both it and confidences are estimates
# Drafters of each target's own, beside the pool: their drafts take no time.
FORCED = "grammar"  # of tokens that a grammar forces
PREDICTION = "prediction"  # of tokens that the caller predicted
FREE_DRAFTERS = frozenset((FORCED, PREDICTION))


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What a draft of a request may spend: decided by the target, applied by the drafter (`router/drafting/stopping.py`).
    Prices are in tokens that the target could decode instead."""

    num_tokens: int = 0  # of a proposal, at most; 0: the drafter stays in step without drafting
    row_price: float = 0.0  # of a row of the pass: a draft token that is less likely to survive is not worth its row
    second_price: float = 0.0  # of a second of drafting, for this request; 0: nobody waits for drafts
    min_confidence: float = 0.0  # a draft ends with the first token of less confidence
    expected_confidence: float | None = None  # of the next token of any request: a batch ends as AdaSpec ends one
    ahead_len: int = 0  # tokens that may be drafted beyond the proposal while it is verified

    @property
    def ends_drafts(self) -> bool:
        """Whether it ends drafts that take no time."""
        return self.min_confidence > 0.0 or self.expected_confidence is not None

    @property
    def least_survival(self) -> float:
        """Survival below which lookups and cascades end a draft; lookups always keep the first token."""
        return PRICE_SHARE * self.row_price


NO_DRAFTS = DraftTerms()


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of a request. None: no objective."""

    ttft_s: float | None = None  # time to first token, from the request's arrival at the process that holds it
    tpot_s: float | None = None  # mean time per output token after the first
    name: str | None = None  # of its class (`cluster.config.api`), for metrics


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of the target's model, which is a model id of the API."""

    name: str
    path: str  # of its folder, on every machine with a target
    key: str  # of this loading: another adapter may get its name


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to complete. An API call with ``n`` choices makes n requests with different seeds."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    slo: Slo = Slo()
    chain: tuple[str, ...] | None = None  # drafters, nearest to the target last; None: the router chooses; (): none
    output_token_ids: tuple[int, ...] = ()  # committed already, by a target that was lost
    cache_salt: str = ""  # of its caller
    was_admitted: bool = False  # by a target that was lost: another one does not refuse it because of its load
    trace: str = ""  # `traceparent` of the call (W3C Trace Context); "": it is not traced
    prediction_token_ids: tuple[int, ...] = ()  # the output as its caller predicts it, which is drafted; (): no prediction
    adapter: Adapter | None = None  # None: the model alone

    @property
    def salt(self) -> str:
        """Only requests with the same one share what is cached and what drafters learn: of one adapter, too."""
        return self.cache_salt if self.adapter is None else self.adapter.key + self.cache_salt

    @property
    def committed_len(self) -> int:
        """When the request reaches its target."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def teaches(self) -> bool:
        """Whether its acceptance is evidence about drafters: not if it disables drafting or forces its tokens."""
        return self.chain != () and not self.sampling.dictates


@record
class Proposal:
    """Draft tokens that extend the first ``base_len`` committed tokens of a request."""

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # the drafter's probability that each token is accepted if those before it are
    drafter: str
    unfinished: bool = False  # the drafter stopped at its budget or out of time, and could continue


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the model's context
    ABORT = "abort"  # given up by its target, which stops or fails: another may continue it; Commit.error says why
    ERROR = "error"  # the engine failed on this request; Commit.error says why
    OVERLOADED = "overloaded"  # refused: the queue is full
    DRAINING = "draining"  # refused: the target takes no more requests
    REFUSED = "refused"  # what the request asks for is not possible; Commit.error says why


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the target's raw distribution, before penalties, bias and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most probable first
    rank: int | None = None  # 1: the most probable token; of prompt tokens only


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill statistics of a request. Times are durations in seconds on the target's clock. Of a request that is refused
    because its first token would come too late, they are predictions."""

    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_s: float  # from the request's arrival at the target to its first pass
    prefill_s: float  # from its first pass to its first token


@record
class Commit:
    """Tokens that became final in one round: the accepted draft tokens, then the bonus token, unless the sequence ended."""

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_proposed: int = 0  # verified draft tokens
    num_accepted: int = 0  # of them
    drafter: str | None = None  # of the proposal at hand, even if it was empty or not verified
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None  # the reason of ERROR, OVERLOADED, REFUSED and ABORT
    prefill: Prefill | None = None  # with the first tokens of a request, and with some refusals
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens, from the second on; before other commits


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """The router's decisions, published every slot; each round reads the newest.

    A chain names drafters, nearest to the target last; () is the target alone. ``scorers`` keep in step, in their spare
    time, with requests that others draft for (SPIN's fast switching), and report counterfactual scores.
    """

    version: int
    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: tuple[tuple[str, ...], ...] = ((),)  # round-robin, for requests that the router has not seen
    scorers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the served model."""

    name: str
    vocab_size: int
    max_model_len: int  # prompt and output together
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str  # equal fingerprints: equal token ids
    aliases: tuple[str, ...] = ()  # further names that callers may use
    adapters: tuple[Adapter, ...] = ()
    max_adapters: int = 0  # at once; 0: its engine takes none

    def adapter(self, name: str | None) -> Adapter | None:
        return next((one for one in self.adapters if one.name == name), None)
