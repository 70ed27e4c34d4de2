"""The tokenizer, without torch or transformers, so that the API process stays small.

Decoding concatenates the bytes of tokens and reads them as UTF-8, which makes streaming exact and linear.
"""

import asyncio
import codecs
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from cluster.errors import InvalidField, ModelUnavailable, OutriderError
from deploy.api.chat_template import (
    DEFAULT_OPTIONS,
    ChatPrompt,
    ChatTemplate,
    ControlTokens,
    TemplateOptions,
    load_chat_template,
)
from engine.models.tokenizer import spelling_of

# Up to here encoding (about 1 us per character) costs less than a thread.
_INLINE_CHARS = 2000
# Longer texts are first counted in slices, so that texts that are far too long are refused early.
_SLICE_CHARS = 2**16
# Extra tokens that cutting a word at a slice's end may add.
_CUT_TOKENS = 16


class TextTooLong(OutriderError):
    """A text has too many tokens; ``num_tokens``: counted so far."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text has more than {num_tokens} tokens")
        self.num_tokens = num_tokens


class Tokenizer:
    """The served model's tokenizer. Immutable, so threads can share it."""

    def __init__(self, fast: FastTokenizer, chat_template: ChatTemplate | None, folder: Path | None = None) -> None:
        fast.no_truncation()
        fast.no_padding()
        self.folder = folder
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._control_tokens = ControlTokens(self._special.values())
        self._spelling = spelling_of(None if fast.decoder is None else json.loads(fast.decoder.__getstate__()))
        self._bytes: dict[int, bytes] = {}  # cache of token_bytes
        self.chat_template = chat_template
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Of a Hugging Face folder. Raises ModelUnavailable: a file is missing, damaged or unsupported."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelUnavailable(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            raise ModelUnavailable(f"{path} cannot be read: {error}") from error
        return cls(fast, load_chat_template(folder), folder)

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int) -> tuple[int, ...]:
        """Token ids of ``text``. Raises TextTooLong: far more than ``max_tokens``; slightly longer results are returned."""
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens, max_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens, max_tokens)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS, *, max_tokens: int
    ) -> tuple[int, ...]:
        """Token ids of a conversation. Only the template makes special tokens; a message that spells one is text.

        Raises InvalidField: the model has no chat template, or it rejects the messages; TextTooLong as ``encode``.
        """
        # Variables and tools of unknown size are rendered in the thread.
        num_chars = sum(len(value) for message in messages for value in message.values())
        has_calls = any("tool_calls" in message for message in messages)
        if num_chars <= _INLINE_CHARS and not (options.variables or options.tools or has_calls):
            prompt = self._render(messages, options)
            if prompt.control_spans is None:
                return self._encode(prompt.text, False, max_tokens)
            return await asyncio.to_thread(self._encode_marked, prompt, max_tokens)
        return await asyncio.to_thread(lambda: self._encode_marked(self._render(messages, options), max_tokens))

    def _render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> ChatPrompt:
        if self.chat_template is None:
            raise InvalidField("messages", len(messages), "the model has no chat template; use /v1/completions")
        return self._control_tokens.prompt(self.chat_template, messages, options)

    def _encode_marked(self, prompt: ChatPrompt, max_tokens: int) -> tuple[int, ...]:
        """Encodes the control spans as special tokens and everything else as text."""
        if prompt.control_spans is None:
            return self._encode(prompt.text, False, max_tokens)
        self._check_len(prompt.text, max_tokens)
        fast, aliases, ids = self._aliased
        pieces, at = [], 0
        for begin, end in prompt.control_spans:
            pieces += [prompt.text[at:begin], aliases[prompt.text[begin:end]]]
            at = end
        pieces.append(prompt.text[at:])
        return tuple(ids.get(i, i) for i in _encoding(fast, "".join(pieces), False).ids)

    @cached_property
    def _aliased(self) -> tuple[FastTokenizer, dict[str, str], dict[int, int]]:
        """A copy whose special tokens have secret spellings, so that the usual spellings are text: the tokenizer, the
        secret spellings by the usual ones, and the original ids by the copy's. It takes as much memory as the tokenizer.
        """
        secret = secrets.token_hex(16)
        aliases = {spelling: f"{secret}-{token_id}-" for token_id, spelling in self._special.items()}
        state: dict[str, Any] = json.loads(self._fast.to_str())
        for added in state["added_tokens"]:
            added["content"] = aliases.get(added["content"], added["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {aliases.get(token, token): token_id for token, token_id in model["vocab"].items()}
        else:  # a unigram model: token and score
            model["vocab"] = [[aliases.get(token, token), score] for token, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
        state["post_processor"] = None  # adds special tokens by name; not used here
        fast = FastTokenizer.from_str(json.dumps(state))
        ids: dict[int, int] = {}
        for token_id, spelling in self._special.items():
            alias_id = fast.token_to_id(aliases[spelling])
            assert alias_id is not None, f"{spelling}: renamed, it is not in the vocabulary"
            ids[alias_id] = token_id
        return fast, aliases, ids

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int) -> tuple[int, ...]:
        self._check_len(text, max_tokens)
        return tuple(_encoding(self._fast, text, add_special_tokens).ids)

    def _check_len(self, text: str, max_tokens: int) -> None:
        """Raises TextTooLong for a text that is far too long, before all of it is encoded."""
        if len(text) > _SLICE_CHARS:
            num_tokens = 0
            for start in range(0, len(text), _SLICE_CHARS):
                num_tokens += len(_encoding(self._fast, text[start : start + _SLICE_CHARS], False)) - _CUT_TOKENS
                if num_tokens > max_tokens:
                    raise TextTooLong(num_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes; empty for special tokens and ids beyond the vocabulary (padding rows)."""
        if token_id not in self._bytes:
            token = None if token_id in self._special else self._fast.id_to_token(token_id)
            self._bytes[token_id] = b"" if token is None else self._spelling(token)
        return self._bytes[token_id]

    def all_token_bytes(self, token_id: int) -> bytes:
        """As ``token_bytes``, with the spelling of special tokens."""
        spelling = self._special.get(token_id)
        return self.token_bytes(token_id) if spelling is None else spelling.encode()

    def encode_each(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Of short texts. ``encode_batch`` releases the GIL."""
        return [tuple(one.ids) for one in self._fast.encode_batch(list(texts), add_special_tokens=False)]

    def special_id(self, spelling: str) -> int | None:
        """The special token of this spelling, if there is one."""
        return next((token_id for token_id, known in self._special.items() if known == spelling), None)

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; "" for unknown ids."""
        return [self._fast.id_to_token(token_id) or "" for token_id in token_ids]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, with special tokens. ``decode_batch`` releases the GIL."""
        return self._fast.decode_batch([list(token_ids)], skip_special_tokens=False)[0]

    def bounds(self, token_ids: Sequence[int], text: str) -> list[tuple[int, int]]:
        """The characters of each token of ``text``. Special tokens that the tokenizer added to it have none."""
        for spelled in (self.all_token_bytes, self.token_bytes):
            utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
            ends = list(accumulate(len(utf8.decode(spelled(token_id))) for token_id in token_ids))
            if not ends or ends[-1] == len(text):
                break
        return list(zip([0, *ends], ends, strict=False))

    def token_name(self, token_id: int) -> str:
        """A token's text, or its name if it has no text; for log-probabilities."""
        text = self.token_bytes(token_id).decode("utf-8", errors="replace")
        return text or self._fast.id_to_token(token_id) or f"<{token_id}>"

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, without special tokens."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")


class Detokenizer:
    """A character that spans several tokens is returned with the last of them. Invalid bytes become U+FFFD at once, an
    incomplete character in ``flush``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> None:
        """``shown``: special tokens that are text all the same."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.all_token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._shown:
            return self._utf8.decode(self._tokenizer.all_token_bytes(token_id))
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def _encoding(fast: FastTokenizer, text: str, add_special_tokens: bool) -> Encoding:
    """Long texts are encoded as a batch of one: ``encode_batch`` releases the GIL, ``encode`` does not."""
    if len(text) <= _INLINE_CHARS:
        return fast.encode(text, add_special_tokens=add_special_tokens)
    return fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]
