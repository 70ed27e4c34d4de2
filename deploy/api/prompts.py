"""Tokens of the texts of a call. Prompts are within the model's context, or cut to it as the caller asks."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from cluster.types import ModelInfo
from deploy.api.answer import encode_json
from deploy.api.errors import bad_request
from deploy.api.messages import text_of
from deploy.api.params import Prompt, check_prompt, check_tokens, context_exceeded
from deploy.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationFields, TokenizeRequest
from deploy.api.tokenizer import TextTooLong, Tokenizer

T = TypeVar("T")
Encode = Callable[[], Awaitable[tuple[int, ...]]]
Messages = Sequence[Mapping[str, Any]]


class InShare(Protocol):
    """Runs work within the tenant's share of threads and until the call's deadline."""

    async def __call__(self, request: Request, work: Callable[[], Awaitable[T]]) -> T: ...


class Prompts:
    """Methods raise ApiError (400) for a prompt that is empty or too long, and what ``in_share`` raises."""

    def __init__(self, tokenizer: Tokenizer, in_share: InShare, max_request_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._in_share = in_share
        self._max_tokens = max_request_bytes  # of a text that is cut

    async def of_chat(self, request: Request, fields: ChatRequest, info: ModelInfo, *, drops_oldest: bool) -> Prompt:
        """``drops_oldest``: the oldest messages give way where the prompt leaves no room for the answer."""
        limit = self._limit(fields, info)
        options = fields.template_options()

        def encode(messages: Messages) -> Awaitable[tuple[int, ...]]:
            return self._tokenizer.encode_chat(messages, options, max_tokens=limit)

        async def fits(messages: Messages) -> bool:
            try:
                return len(await self._in_share(request, partial(encode, messages))) <= _room(fields, info)
            except TextTooLong:
                return False

        messages: Messages = [message.for_template() for message in fields.messages]
        if drops_oldest:
            messages = await fitting(messages, fits)
        return await self._encoded(request, partial(encode, messages), "messages", fields, info)

    async def token_ids(self, request: Request, fields: ChatRequest | TokenizeRequest, info: ModelInfo) -> tuple[int, ...]:
        """Of a conversation or text, which may exceed the context."""
        if isinstance(fields, TokenizeRequest) and fields.prompt is not None:
            return await self._token_ids(request, self._encode(fields.prompt, fields, self._max_tokens), "prompt", info)
        messages = [message.for_template() for message in fields.messages or ()]
        encode = partial(self._tokenizer.encode_chat, messages, fields.template_options(), max_tokens=self._max_tokens)
        return await self._token_ids(request, encode, "messages", info)

    async def tokenize(self, request: Request, fields: TokenizeRequest, info: ModelInfo) -> Response:
        """Tokens of a prompt or of messages, as for a completion or chat."""
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_request("prompt", "or messages must be given, but not both")
        if fields.messages is not None and fields.add_special_tokens:
            raise bad_request("add_special_tokens", "is not supported yet with messages; leave it out")
        token_ids = await self.token_ids(request, fields, info)

        def document() -> bytes:
            token_strs = _list_json(self._tokenizer.token_strs(token_ids)) if fields.return_token_strs else b"null"
            head = encode_json({"count": len(token_ids), "max_model_len": info.max_model_len})[:-1]
            return b'%b,"tokens":%b,"token_strs":%b}' % (head, _list_json(token_ids), token_strs)

        return await self._in_share(request, partial(_response, document, len(token_ids)))

    async def detokenize(self, request: Request, fields: DetokenizeRequest, info: ModelInfo) -> Response:
        """The text of tokens, with special tokens."""
        check_tokens("tokens", fields.tokens, info)

        def document() -> bytes:
            return encode_json({"prompt": self._tokenizer.text_of(fields.tokens)})

        return await self._in_share(request, partial(_response, document, len(fields.tokens)))

    async def prediction(self, request: Request, fields: ChatRequest, prompt_len: int, info: ModelInfo) -> tuple[int, ...]:
        """Of the predicted answer, as far as the context has room for it; (): none is predicted."""
        if fields.prediction is None:
            return ()
        text = text_of(fields.prediction.content)
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False, max_tokens=self._max_tokens)
        token_ids = (await self._token_ids(request, encode, "prediction", info))[: info.max_model_len - prompt_len]
        check_tokens("prediction", token_ids, info)
        return token_ids

    async def sampling(self, request: Request, fields: GenerationFields) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Sampling parameters that are made of texts: each bad word as it is spelled at the beginning of a text and after a
        space. Other tokens may spell it, as in vLLM."""
        words = [word.lstrip() for word in fields.bad_words or ()]
        texts = [text for word in words for text in (word, f" {word}")]

        async def encode() -> Sequence[tuple[int, ...]]:
            return await asyncio.to_thread(self._tokenizer.encode_each, texts)

        spelled = await self._in_share(request, encode) if texts else ()
        for i, word in enumerate(words):
            if not word or () in spelled[2 * i : 2 * i + 2]:
                raise bad_request(f"bad_words.{i}", "has no tokens" if word else "must hold more than spaces")
        return {"bad_words": tuple(dict.fromkeys(spelled))}

    async def of_completion(self, request: Request, fields: CompletionRequest, info: ModelInfo) -> Sequence[Prompt]:
        prompts = []
        for field, one in fields.prompts().items():
            if isinstance(one, str):
                encode = self._encode(one, fields, self._limit(fields, info))
                prompt = await self._encoded(request, encode, field, fields, info)
            else:
                prompt = _cut(Prompt(tuple(one), field), fields, info)
                check_prompt(prompt, info)
            if fields.echo:
                is_cut = fields.truncate_prompt_tokens is not None
                prompt = replace(
                    prompt, echo=one if isinstance(one, str) and not is_cut else await self._text(request, prompt)
                )
            prompts.append(prompt)
        return prompts

    def _limit(self, fields: GenerationFields, info: ModelInfo) -> int:
        """Texts with far more tokens are refused before all of them is encoded."""
        return info.max_model_len - 1 if fields.truncate_prompt_tokens is None else self._max_tokens

    def _encode(self, text: str, fields: CompletionRequest | TokenizeRequest, max_tokens: int) -> Encode:
        adds = fields.add_special_tokens is not False
        return partial(self._tokenizer.encode, text, add_special_tokens=adds, max_tokens=max_tokens)

    async def _encoded(
        self, request: Request, encode: Encode, field: str, fields: GenerationFields, info: ModelInfo
    ) -> Prompt:
        prompt = _cut(Prompt(await self._token_ids(request, encode, field, info), field), fields, info)
        check_prompt(prompt, info)
        return prompt

    async def _token_ids(self, request: Request, encode: Encode, field: str, info: ModelInfo) -> tuple[int, ...]:
        try:
            return await self._in_share(request, encode)
        except TextTooLong as error:
            raise context_exceeded(field, error.num_tokens, 1, info, counted=False) from error

    async def _text(self, request: Request, prompt: Prompt) -> str:
        return await self._in_share(request, lambda: asyncio.to_thread(self._tokenizer.text_of, prompt.token_ids))


def _cut(prompt: Prompt, fields: GenerationFields, info: ModelInfo) -> Prompt:
    """As vLLM: the last tokens, or with ``truncation_side`` "right" the first; -1: as many as leave room for the answer."""
    most = fields.truncate_prompt_tokens
    if most is None:
        return prompt
    most = _room(fields, info) if most == -1 else most
    kept = prompt.token_ids[:most] if fields.truncation_side == "right" else prompt.token_ids[-most:]
    return replace(prompt, token_ids=kept)


def _room(fields: GenerationFields, info: ModelInfo) -> int:
    """For a prompt before the longest answer that the caller asks for, or before one token."""
    longest = fields.max_completion_tokens if isinstance(fields, ChatRequest) else None
    return max(1, info.max_model_len - (longest or fields.max_tokens or 1))


async def fitting(messages: Messages, fits: Callable[[Messages], Awaitable[bool]]) -> Messages:
    """``truncation: "auto"`` of the Responses API: as many of the newest messages as fit, after the system messages at the
    beginning; all if nothing fits.

    A tool's result is not kept without the call before it. ``fits`` is asked a logarithmic number of times.
    """
    num_kept = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    firsts = [i for i in range(num_kept, len(messages)) if messages[i]["role"] != "tool"]

    def from_first(i: int) -> Messages:
        return [*messages[:num_kept], *messages[firsts[i] :]]

    low, high = 0, len(firsts)  # those before ``low`` are too long, those from ``high`` on fit
    while low < high:
        middle = (low + high) // 2
        if await fits(from_first(middle)):
            high = middle
        else:
            low = middle + 1
    return from_first(high) if high < len(firsts) else messages


# Up to here decoding and JSON encoding (about 0.5 us per token) cost less than a thread.
_INLINE_TOKENS = 2000
# The JSON encoder holds the GIL, so lists are encoded in slices of this length.
_SLICE_LEN = 2**13


async def _response(document: Callable[[], bytes], num_tokens: int) -> Response:
    """The JSON of ``document``, which runs in a thread if there are many tokens."""
    body = document() if num_tokens <= _INLINE_TOKENS else await asyncio.to_thread(document)
    return Response(body, media_type="application/json")


def _list_json(items: Sequence[object]) -> bytes:
    slices = (encode_json(items[start : start + _SLICE_LEN])[1:-1] for start in range(0, len(items), _SLICE_LEN))
    return b"[" + b",".join(slices) + b"]"
