"""``/tokenize`` and ``/detokenize``, as in vLLM."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response

from cluster.types import ModelInfo
from deploy.api.answer import encode_json
from deploy.api.errors import bad_request
from deploy.api.params import check_model, check_tokens
from deploy.api.schema import DetokenizeRequest, TokenizeRequest
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import TextTooLong, Tokenizer

# Up to here decoding and JSON encoding (about 0.5 us per token) cost less than a thread.
_INLINE_TOKENS = 2000
# The JSON encoder holds the GIL, so lists are encoded in slices of this length.
_SLICE_LEN = 2**13


async def tokenize(fields: TokenizeRequest, tokenizer: Tokenizer, info: ModelInfo, settings: ApiSettings) -> Response:
    """Tokens of a prompt or of messages, as for a completion or chat."""
    check_model(fields.model, info)
    # Texts longer than the model's context may be tokenized, within the body's limit.
    max_tokens = settings.max_request_bytes
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("prompt", "or messages must be given, but not both")
    try:
        if fields.prompt is not None:
            adds = fields.add_special_tokens is not False
            token_ids = await tokenizer.encode(fields.prompt, add_special_tokens=adds, max_tokens=max_tokens)
        else:
            if fields.add_special_tokens:
                raise bad_request("add_special_tokens", "is not supported yet with messages; leave it out")
            messages = [message.for_template() for message in fields.messages or ()]
            token_ids = await tokenizer.encode_chat(messages, fields.template_options(), max_tokens=max_tokens)
    except TextTooLong as error:
        raise bad_request("prompt", f"has more than {error.num_tokens} tokens") from error

    def document() -> str:
        token_strs = _list_json(tokenizer.token_strs(token_ids)) if fields.return_token_strs else "null"
        head = f'"count":{len(token_ids)},"max_model_len":{info.max_model_len}'
        return f'{{{head},"tokens":{_list_json(token_ids)},"token_strs":{token_strs}}}'

    return await _response(document, len(token_ids))


async def detokenize(fields: DetokenizeRequest, tokenizer: Tokenizer, info: ModelInfo) -> Response:
    """The text of tokens, with special tokens."""
    check_model(fields.model, info)
    check_tokens("tokens", fields.tokens, info)
    return await _response(lambda: encode_json({"prompt": tokenizer.text_of(fields.tokens)}), len(fields.tokens))


async def _response(document: Callable[[], str], num_tokens: int) -> Response:
    """The JSON of ``document``, which runs in a thread if there are many tokens."""
    body = document() if num_tokens <= _INLINE_TOKENS else await asyncio.to_thread(document)
    return Response(body, media_type="application/json")


def _list_json(items: Sequence[object]) -> str:
    slices = (encode_json(items[start : start + _SLICE_LEN])[1:-1] for start in range(0, len(items), _SLICE_LEN))
    return f"[{','.join(slices)}]"
