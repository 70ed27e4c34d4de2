"""JSON of chat and completion choices."""

from collections.abc import Sequence

from deploy.api.choice import Choice, Delta, OutputToken
from deploy.api.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


class _Format:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _logprobs_of(self, tokens: Sequence[OutputToken]) -> dict[str, object]:
        raise NotImplementedError

    def _ending(self, choice: Choice, delta: Delta) -> dict[str, object]:
        """The fields after the text of a choice or chunk."""
        asked = choice.request.sampling.top_logprobs is not None
        return {
            "logprobs": self._logprobs_of(delta.tokens) if asked else None,
            "finish_reason": delta.finish,
            **({"token_ids": delta.token_ids} if choice.options.token_ids else {}),
        }


class ChatFormat(_Format):
    """OpenAI's chat format."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"  # of a whole answer
    chunk_kind = "chat.completion.chunk"

    def opening(self, choice: Choice) -> dict[str, object] | None:
        """The first chunk of a choice's stream, if there is one before its text."""
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def root(self, choices: Sequence[Choice]) -> dict[str, object]:
        """Fields beside ``choices``, in the whole answer or a stream's first chunk."""
        return _prompt_token_ids(choices[0])

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, object]:
        content = {"content": delta.text} if delta.text else {}
        return {"index": choice.index, "delta": content, **self._ending(choice, delta)}

    def whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": choice.index, "message": message, **self._ending(choice, delta)}

    def _logprobs_of(self, tokens: Sequence[OutputToken]) -> dict[str, object]:
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: OutputToken) -> dict[str, object]:
        logprob = None if token.logprobs is None else token.logprobs.logprob
        top = () if token.logprobs is None else token.logprobs.top
        return {
            **self._named(token.id, logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in top],
        }

    def _named(self, token_id: int, logprob: float | None) -> dict[str, object]:
        spelled = self._tokenizer.token_bytes(token_id)
        return {
            "token": self._tokenizer.token_name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(spelled) if spelled else None,
        }


class CompletionFormat(_Format):
    """OpenAI's legacy format: parallel lists, and a mapping from token to log-probability per position."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def opening(self, choice: Choice) -> dict[str, object] | None:
        prompt_token_ids = _prompt_token_ids(choice)
        if choice.options.echo is None and not prompt_token_ids:
            return None
        text = choice.options.echo or ""
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None, **prompt_token_ids}

    def root(self, choices: Sequence[Choice]) -> dict[str, object]:
        return {}

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, object]:
        return {"index": choice.index, "text": delta.text, **self._ending(choice, delta)}

    def whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        echo = choice.options.echo or ""
        return {**self.chunk(choice, delta), "text": echo + delta.text, **_prompt_token_ids(choice)}

    def _logprobs_of(self, tokens: Sequence[OutputToken]) -> dict[str, object]:
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [None if t.logprobs is None else _finite(t.logprobs.logprob) for t in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.start for token in tokens],
        }

    def _top(self, token: OutputToken) -> dict[str, float | None]:
        """The most probable tokens, and the chosen token."""
        if token.logprobs is None:
            return {}
        entries = (*token.logprobs.top, (token.id, token.logprobs.logprob))
        return {self._name(token_id): _finite(logprob) for token_id, logprob in entries}

    def _name(self, token_id: int) -> str:
        """Distinct also for incomplete characters, which would all decode to U+FFFD."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode("utf-8") or self._tokenizer.token_name(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


AnswerFormat = ChatFormat | CompletionFormat


def _prompt_token_ids(choice: Choice) -> dict[str, object]:
    return {"prompt_token_ids": choice.request.prompt_token_ids} if choice.options.token_ids else {}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None else max(logprob, _LOWEST_LOGPROB)
