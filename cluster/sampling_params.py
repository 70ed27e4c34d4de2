"""Sampling parameters of a request, with the range of each: the one declaration that the API's fields, the checks of clients
and peers, and the wire follow (`deploy/api/schema.py`, `cluster/message_checks.py`, `cluster/transport/codec.py`).
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Self, get_args, get_type_hints

from cluster.errors import InvalidField

MAX_GRAMMAR_CHARS = 65536


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: the schema, as JSON
    JSON_OBJECT = "json_object"  # any JSON object; no source
    REGEX = "regex"  # matches the whole output
    EBNF = "ebnf"  # GBNF, llama.cpp's dialect; the root rule is `root`
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's format, as JSON


@dataclass(frozen=True, slots=True)
class Grammar:
    """Part of a request's sampling parameters. Equal grammars are compiled once per process.

    Raises:
        InvalidField: the source is too long.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise InvalidField("grammar", len(self.source), f"must have at most {MAX_GRAMMAR_CHARS} characters")


MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 256  # each spelling counts
MAX_BAD_WORD_LEN = 512  # tokens
DICTATING_BIAS = 20.0  # nats: exceeds the differences among a target's plausible tokens
_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Within:
    """A number's range; ``above``: ``low`` itself is outside. None passes."""

    low: float
    high: float
    above: bool = False

    def check(self, name: str, value: float | None) -> None:
        if value is None or (self.low <= value <= self.high and not (self.above and value == self.low)):
            return  # not for NaN
        span = (
            f"be greater than {self.low:g} and at most {self.high:g}"
            if self.above
            else f"lie between {self.low} and {self.high}"
        )
        raise InvalidField(name, value, f"must {span}")


@dataclass(frozen=True, slots=True)
class AtMost:
    """A list's length."""

    num: int
    of: str

    def check(self, name: str, values: Sequence[object]) -> None:
        if len(values) > self.num:
            raise InvalidField(name, len(values), f"must have at most {self.num} {self.of}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """Callers of the API give it under its own name. ``off``: values by which they turn it off, which is its default."""

    off: tuple[int, ...] = ()


_SCALAR = Scalar()
_Penalty = Annotated[float, _SCALAR, Within(-2.0, 2.0)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. With the target and the prompt they determine the output.

    Penalties follow the OpenAI API (presence, frequency: over generated tokens) and Hugging Face (repetition: over
    prompt and generated tokens). Penalties, bias, temperature, top-k, top-p and min-p apply in that order.
    """

    max_tokens: Annotated[int, Within(1, _INT32)]
    temperature: Annotated[float, _SCALAR, Within(0.0, 2.0)] = 1.0
    top_k: Annotated[int | None, Scalar(off=(0, -1)), Within(1, _INT32)] = None
    top_p: Annotated[float, _SCALAR, Within(0.0, 1.0, above=True)] = 1.0
    min_p: Annotated[float, _SCALAR, Within(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, _SCALAR, Within(0.0, 10.0, above=True)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], AtMost(MAX_LOGIT_BIAS, "entries")] = ()
    stop: Annotated[tuple[str, ...], AtMost(MAX_STOP_STRINGS, "strings")] = ()  # matched on text, after detokenizing
    stop_token_ids: tuple[int, ...] = ()  # matched on tokens; the token itself is committed
    min_tokens: Annotated[int, _SCALAR] = 0  # before this many, stop tokens and EOS are masked
    ignore_eos: Annotated[bool, _SCALAR] = False
    seed: Annotated[int, Within(0, MAX_SEED)] = field(default_factory=lambda: secrets.randbits(64))  # of the sampling noise
    top_logprobs: Annotated[int | None, Within(0, MAX_TOP_LOGPROBS)] = (
        None  # None: no log-probabilities; 0: the chosen token's
    )
    allowed_token_ids: Annotated[tuple[int, ...], AtMost(MAX_ALLOWED_TOKENS, "tokens")] = ()  # (): all tokens
    prompt_logprobs: Annotated[int | None, Within(0, MAX_TOP_LOGPROBS)] = (
        None  # as top_logprobs, of each prompt token but the first
    )
    # No output holds one of them, unless the grammar leaves nothing else.
    bad_words: Annotated[tuple[tuple[int, ...], ...], AtMost(MAX_BAD_WORDS, "spellings")] = ()
    grammar: Grammar | None = None  # of the output; its end ends the request, also with ignore_eos or before min_tokens

    def __post_init__(self) -> None:
        for name, limit in _LIMITS:
            limit.check(name, getattr(self, name))
        for _, bias in self.logit_bias:
            _BIAS.check("logit_bias", bias)
        if any(not text for text in self.stop):
            raise InvalidField("stop", "", "must not hold an empty string")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidField("min_tokens", self.min_tokens, f"must lie between 0 and max_tokens ({self.max_tokens})")
        if not all(0 < len(word) <= MAX_BAD_WORD_LEN for word in self.bad_words):
            raise InvalidField("bad_words", len(self.bad_words), f"must have 1 to {MAX_BAD_WORD_LEN} tokens each")

    @property
    def dictates(self) -> bool:
        """Whether the caller forces tokens, by a grammar, a list of allowed tokens or a large bias."""
        is_large = any(bias >= DICTATING_BIAS for _, bias in self.logit_bias)
        return self.grammar is not None or bool(self.allowed_token_ids) or is_large

    @property
    def has_penalties(self) -> bool:
        """Whether the choice at a position depends on earlier tokens other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether improbable tokens may not be chosen."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits of single tokens are changed before temperature and filters, except by ``min_tokens``."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.allowed_token_ids) or bool(self.bad_words)

    def token_ids(self) -> Mapping[str, Sequence[int]]:
        """The tokens that parameters name, by the parameter."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "bad_words": [token_id for word in self.bad_words for token_id in word],
        }

    def known_to(self, num_known: int) -> Self | None:
        """For drafts of a model that knows the first ``num_known`` tokens alone; None: it knows none that is allowed."""
        allowed = tuple(token_id for token_id in self.allowed_token_ids if token_id < num_known)
        if self.allowed_token_ids and not allowed:
            return None
        return replace(
            self,
            top_logprobs=None,
            logit_bias=tuple((token_id, bias) for token_id, bias in self.logit_bias if token_id < num_known),
            allowed_token_ids=allowed,
            bad_words=tuple(word for word in self.bad_words if max(word) < num_known),
        )


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_BIAS = Within(-100.0, 100.0)
_LIMITS: Sequence[tuple[str, Within | AtMost]] = [
    (name, limit) for name, hint in _HINTS.items() for limit in get_args(hint)[1:] if isinstance(limit, Within | AtMost)
]
# Those that callers give under their own names: the type of each, and how it is turned off.
SCALARS: Mapping[str, tuple[Any, Scalar]] = {
    name: (get_args(hint)[0], scalar)
    for name, hint in _HINTS.items()
    for scalar in get_args(hint)[1:]
    if isinstance(scalar, Scalar)
}
