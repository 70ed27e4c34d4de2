"""Sampling parameters of a request, with the range of each."""

import secrets
from dataclasses import dataclass, field

from cluster.errors import InvalidField
from cluster.grammar import Grammar

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 256  # each spelling counts
MAX_BAD_WORD_LEN = 512  # tokens
DICTATING_BIAS = 20.0  # nats: exceeds the differences among a target's plausible tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. With the target and the prompt they determine the output.

    Penalties follow the OpenAI API (presence, frequency: over generated tokens) and Hugging Face (repetition: over
    prompt and generated tokens). Penalties, bias, temperature, top-k, top-p and min-p apply in that order.
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
    stop: tuple[str, ...] = ()  # matched on text, after detokenizing
    stop_token_ids: tuple[int, ...] = ()  # matched on tokens; the token itself is committed
    min_tokens: int = 0  # before this many, stop tokens and EOS are masked
    ignore_eos: bool = False
    seed: int = field(default_factory=lambda: secrets.randbits(64))  # of the sampling noise; random by default
    top_logprobs: int | None = None  # None: no log-probabilities; 0: the chosen token's only
    allowed_token_ids: tuple[int, ...] = ()  # (): all tokens
    prompt_logprobs: int | None = None  # as top_logprobs, of each prompt token but the first
    bad_words: tuple[tuple[int, ...], ...] = ()  # no output holds one of them, unless the grammar leaves nothing else
    grammar: Grammar | None = None  # of the output; its end ends the request, also with ignore_eos or before min_tokens

    @property
    def dictates(self) -> bool:
        """Whether the caller forces tokens, by a grammar, a list of allowed tokens or a large bias."""
        return (
            self.grammar is not None
            or bool(self.allowed_token_ids)
            or any(bias >= DICTATING_BIAS for _, bias in self.logit_bias)
        )

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
            reason = f"must have at most {MAX_ALLOWED_TOKENS} tokens"
            raise InvalidField("allowed_token_ids", len(self.allowed_token_ids), reason)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidField("bad_words", len(self.bad_words), f"must have at most {MAX_BAD_WORDS} spellings")
        if not all(0 < len(word) <= MAX_BAD_WORD_LEN for word in self.bad_words):
            raise InvalidField("bad_words", len(self.bad_words), f"must have 1 to {MAX_BAD_WORD_LEN} tokens each")
        if self.top_logprobs is not None:
            _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def has_penalties(self) -> bool:
        """Whether the choice at a position depends on earlier tokens other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits of single tokens are changed before temperature and filters, except by ``min_tokens``."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.allowed_token_ids) or bool(self.bad_words)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN, too
        raise InvalidField(name, value, f"must lie between {low} and {high}")
