"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from cluster.types import ModelInfo
from deploy.api.errors import bad_request
from deploy.api.params import check_model, check_tokens
from deploy.api.schema import DetokenizeRequest, TokenizeRequest
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import TextTooLong, Tokenizer


async def tokenize(
    fields: TokenizeRequest, tokenizer: Tokenizer, info: ModelInfo, settings: ApiSettings
) -> dict[str, object]:
    """The tokens of a prompt or of messages, as the same model would get them for a completion or a chat.

    Raises:
        ApiError: 400, naming the field; 404, another model.
        InvalidField: the chat template refuses the messages.
    """
    check_model(fields.model, info)
    # Longer texts than the model takes can be counted, within the limit of the body.
    max_tokens = settings.max_request_bytes
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("prompt", "or messages must be given, and not both")
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
    return {
        "count": len(token_ids),
        "max_model_len": info.max_model_len,
        "tokens": token_ids,
        "token_strs": tokenizer.token_strs(token_ids) if fields.return_token_strs else None,
    }


def detokenize(fields: DetokenizeRequest, tokenizer: Tokenizer, info: ModelInfo) -> dict[str, object]:
    """The text of tokens, special ones included. Raises ApiError: 400, an id is no token; 404, another model."""
    check_model(fields.model, info)
    check_tokens("tokens", fields.tokens, info)
    return {"prompt": tokenizer.text_of(fields.tokens)}
