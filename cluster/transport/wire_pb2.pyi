from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_FINISHED: _ClassVar[FinishReason]
    STOP: _ClassVar[FinishReason]
    LENGTH: _ClassVar[FinishReason]
    ABORT: _ClassVar[FinishReason]
    ERROR: _ClassVar[FinishReason]
    OVERLOADED: _ClassVar[FinishReason]
    REFUSED: _ClassVar[FinishReason]
    DRAINING: _ClassVar[FinishReason]
NOT_FINISHED: FinishReason
STOP: FinishReason
LENGTH: FinishReason
ABORT: FinishReason
ERROR: FinishReason
OVERLOADED: FinishReason
REFUSED: FinishReason
DRAINING: FinishReason

class Frame(_message.Message):
    __slots__ = ("hello", "welcome", "refusal", "ping", "draft_round", "proposal_round", "submit_round", "commit_round")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROUND_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_ROUND_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ROUND_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    refusal: Refusal
    ping: Ping
    draft_round: DraftRound
    proposal_round: ProposalRound
    submit_round: SubmitRound
    commit_round: CommitRound
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., draft_round: _Optional[_Union[DraftRound, _Mapping]] = ..., proposal_round: _Optional[_Union[ProposalRound, _Mapping]] = ..., submit_round: _Optional[_Union[SubmitRound, _Mapping]] = ..., commit_round: _Optional[_Union[CommitRound, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("role", "name", "vocab_size", "tokenizer_fingerprint", "protocol_version", "nonce", "proof", "instance", "tensors")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    vocab_size: int
    tokenizer_fingerprint: str
    protocol_version: int
    nonce: bytes
    proof: bytes
    instance: str
    tensors: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., protocol_version: _Optional[int] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., instance: _Optional[str] = ..., tensors: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "tokenizer")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    tokenizer: bool
    def __init__(self, reason: _Optional[str] = ..., tokenizer: _Optional[bool] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias_token_ids", "logit_bias_values", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "seed", "top_logprobs", "allowed_token_ids", "prompt_logprobs", "bad_word_lens", "bad_word_token_ids", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_LENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    seed: int
    top_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    bad_word_lens: _containers.RepeatedScalarFieldContainer[int]
    bad_word_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias_token_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., bad_word_lens: _Optional[_Iterable[int]] = ..., bad_word_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request_id", "token_ids", "prompt_len", "sampling", "proposers", "cache_salt", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    sampling: SamplingParams
    proposers: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    trace: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., proposers: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("request_id", "base_len", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("request_id", "terms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    terms: DraftTerms
    def __init__(self, request_id: _Optional[str] = ..., terms: _Optional[_Union[DraftTerms, _Mapping]] = ...) -> None: ...

class DraftTerms(_message.Message):
    __slots__ = ("num_tokens", "row_price", "second_price", "min_confidence", "expected_confidence", "ahead_len")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    SECOND_PRICE_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_LEN_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    row_price: float
    second_price: float
    min_confidence: float
    expected_confidence: float
    ahead_len: int
    def __init__(self, num_tokens: _Optional[int] = ..., row_price: _Optional[float] = ..., second_price: _Optional[float] = ..., min_confidence: _Optional[float] = ..., expected_confidence: _Optional[float] = ..., ahead_len: _Optional[int] = ...) -> None: ...

class DraftRound(_message.Message):
    __slots__ = ("table_version", "opens", "extends", "budgets", "releases")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    extends: _containers.RepeatedCompositeFieldContainer[Extend]
    budgets: _containers.RepeatedCompositeFieldContainer[Budget]
    releases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table_version: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., extends: _Optional[_Iterable[_Union[Extend, _Mapping]]] = ..., budgets: _Optional[_Iterable[_Union[Budget, _Mapping]]] = ..., releases: _Optional[_Iterable[str]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("request_id", "base_len", "token_ids", "confidences", "drafter", "unfinished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    drafter: str
    unfinished: bool
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., drafter: _Optional[str] = ..., unfinished: _Optional[bool] = ...) -> None: ...

class DraftScore(_message.Message):
    __slots__ = ("request_id", "base_len", "num_matched", "num_scored")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    num_matched: int
    num_scored: int
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., num_matched: _Optional[int] = ..., num_scored: _Optional[int] = ...) -> None: ...

class Verified(_message.Message):
    __slots__ = ("proposer", "num_reached", "num_right", "num_asked", "num_proposed", "num_compared", "overlap")
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    NUM_REACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPARED_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    proposer: str
    num_reached: _containers.RepeatedScalarFieldContainer[int]
    num_right: _containers.RepeatedScalarFieldContainer[int]
    num_asked: int
    num_proposed: int
    num_compared: int
    overlap: float
    def __init__(self, proposer: _Optional[str] = ..., num_reached: _Optional[_Iterable[int]] = ..., num_right: _Optional[_Iterable[int]] = ..., num_asked: _Optional[int] = ..., num_proposed: _Optional[int] = ..., num_compared: _Optional[int] = ..., overlap: _Optional[float] = ...) -> None: ...

class LevelReport(_message.Message):
    __slots__ = ("drafter", "num_passes", "num_rows", "busy_s", "num_lost", "verified")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    num_passes: int
    num_rows: int
    busy_s: float
    num_lost: int
    verified: _containers.RepeatedCompositeFieldContainer[Verified]
    def __init__(self, drafter: _Optional[str] = ..., num_passes: _Optional[int] = ..., num_rows: _Optional[int] = ..., busy_s: _Optional[float] = ..., num_lost: _Optional[int] = ..., verified: _Optional[_Iterable[_Union[Verified, _Mapping]]] = ...) -> None: ...

class DraftTiming(_message.Message):
    __slots__ = ("num_requests", "seconds", "waited_s")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    seconds: float
    waited_s: float
    def __init__(self, num_requests: _Optional[int] = ..., seconds: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class OutcomeReport(_message.Message):
    __slots__ = ("num_commits", "num_own", "num_hits", "num_prepared")
    NUM_COMMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_OWN_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREPARED_FIELD_NUMBER: _ClassVar[int]
    num_commits: int
    num_own: int
    num_hits: int
    num_prepared: int
    def __init__(self, num_commits: _Optional[int] = ..., num_own: _Optional[int] = ..., num_hits: _Optional[int] = ..., num_prepared: _Optional[int] = ...) -> None: ...

class ProposalRound(_message.Message):
    __slots__ = ("table_version", "proposals", "scores", "resyncs", "levels", "timings", "outcomes")
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    table_version: int
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    scores: _containers.RepeatedCompositeFieldContainer[DraftScore]
    resyncs: _containers.RepeatedScalarFieldContainer[str]
    levels: _containers.RepeatedCompositeFieldContainer[LevelReport]
    timings: _containers.RepeatedCompositeFieldContainer[DraftTiming]
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeReport]
    def __init__(self, table_version: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[DraftScore, _Mapping]]] = ..., resyncs: _Optional[_Iterable[str]] = ..., levels: _Optional[_Iterable[_Union[LevelReport, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[DraftTiming, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[OutcomeReport, _Mapping]]] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("drafters",)
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, drafters: _Optional[_Iterable[str]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    key: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "prompt_token_ids", "sampling", "arrival_s", "ttft_s", "tpot_s", "chain", "slo_name", "output_token_ids", "cache_salt", "was_admitted", "trace", "prediction_token_ids", "adapter")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SLO_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WAS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    arrival_s: float
    ttft_s: float
    tpot_s: float
    chain: Chain
    slo_name: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    was_admitted: bool
    trace: str
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: Adapter
    def __init__(self, id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., arrival_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., slo_name: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., was_admitted: _Optional[bool] = ..., trace: _Optional[str] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class SubmitRound(_message.Message):
    __slots__ = ("submits", "aborts")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Request]
    aborts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, submits: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., aborts: _Optional[_Iterable[str]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "num_top", "top_token_ids", "top_logprobs", "ranks")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    num_top: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., num_top: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_s", "prefill_s")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "base_len", "token_ids", "num_proposed", "num_accepted", "drafter", "logprobs", "finish", "error", "prefill", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_proposed: int
    num_accepted: int
    drafter: str
    logprobs: Logprobs
    finish: FinishReason
    error: str
    prefill: Prefill
    prompt_logprobs: Logprobs
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_proposed: _Optional[int] = ..., num_accepted: _Optional[int] = ..., drafter: _Optional[str] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[str] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class CommitRound(_message.Message):
    __slots__ = ("commits",)
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    def __init__(self, commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("request_id", "base_len", "token_ids", "num_drafts", "samples")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: int
    samples: bool
    def __init__(self, request_id: _Optional[str] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[int] = ..., samples: _Optional[bool] = ...) -> None: ...

class RankChange(_message.Message):
    __slots__ = ("open", "release")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    release: str
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., release: _Optional[str] = ...) -> None: ...

class RankRound(_message.Message):
    __slots__ = ("changes", "spans", "ends", "depths")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[RankChange]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    ends: bool
    depths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, changes: _Optional[_Iterable[_Union[RankChange, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., ends: _Optional[bool] = ..., depths: _Optional[_Iterable[int]] = ...) -> None: ...
