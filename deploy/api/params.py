"""Converts the fields of a call into requests to the cluster."""

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from http import HTTPStatus
from typing import Any

from cluster.client import ClusterStatus, DrafterStatus
from cluster.config import CUSTOM, SloConfig
from cluster.errors import InvalidField
from cluster.sampling_params import MAX_SEED, SCALARS, SamplingParams
from cluster.types import Adapter, ModelInfo, Request, Slo
from deploy.api.errors import ApiError, bad_request, nearest, shorten
from deploy.api.schema import ChatRequest, CompletionRequest, GenerationFields, Objectives
from deploy.api.settings import ApiSettings

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
_GIVEN = {one.name for one in dataclass_fields(SamplingParams)}  # what callers may give

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    field: str  # path of the caller's field, for errors
    echo: str | None = None  # text put before the answer
    prediction_token_ids: tuple[int, ...] = ()  # of the answer that the caller expects


def check_call(fields: GenerationFields, num_prompts: int, info: ModelInfo, settings: ApiSettings) -> None:
    """Checks that need no tokenization. Raises ApiError: 404 for an unknown model, else 400."""
    check_model(fields.model, info)
    n = fields.n or 1
    if n > settings.max_n:
        raise bad_request("n", f"must be at most {settings.max_n} on this server, got {shorten(n)}")
    if n * num_prompts > settings.max_sequences:
        made = f"{num_prompts} prompts times n = {n} make {n * num_prompts} sequences"
        raise bad_request("prompt", f"{made}; this server takes at most {settings.max_sequences} in one call")
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad_request("prompt_logprobs", "is not available with stream = true")
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options", "is allowed only with stream = true")
    match fields:
        case ChatRequest():
            if fields.top_logprobs and not fields.logprobs:
                raise bad_request("top_logprobs", "is allowed only with logprobs = true")
            given = {fields.max_tokens, fields.max_completion_tokens} - {None}
            if len(given) > 1:
                raise bad_request("max_completion_tokens", "contradicts max_tokens; give one of them")
        case CompletionRequest():
            if fields.max_tokens == 0 and not wants_prompt_only(fields):
                raise bad_request("max_tokens", "may be 0 only with echo or prompt_logprobs")
            if fields.best_of is not None and fields.best_of != n:
                raise bad_request("best_of", f"is not supported; leave it out or give it the value of n ({n})")


def check_model(name: str | None, info: ModelInfo) -> Adapter | None:
    """The adapter of this name. Raises ApiError (404) for another model than that and the served one; None is the served
    one."""
    adapter = info.adapter(name)
    if name is not None and name != info.name and name not in info.aliases and adapter is None:
        message = f"model: {shorten(name)} is not served here; this server has {info.name!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
    return adapter


def context_exceeded(field: str, num_prompt: int, num_output: int, info: ModelInfo, *, counted: bool = True) -> ApiError:
    """In OpenAI's words, which clients look for.

    Args:
        num_prompt: tokens; where not ``counted`` a lower bound, of a text that was not tokenized to its end.
    """
    least = "" if counted else "at least "
    asked = f"{least}{num_prompt + num_output} tokens ({least}{num_prompt} in the messages, {num_output} in the completion)"
    limit = f"This model's maximum context length is {info.max_model_len} tokens"
    advice = "Please reduce the length of the messages or completion."
    return bad_request(field, f"{limit}. However, you requested {asked}. {advice}", "context_length_exceeded")


def check_prompt(prompt: Prompt, info: ModelInfo) -> None:
    """Raises ApiError (400) for a prompt that is empty, too long, or has ids outside the vocabulary."""
    if not prompt.token_ids:
        raise bad_request(prompt.field, "must hold at least one token")
    if len(prompt.token_ids) >= info.max_model_len:  # one token is generated at least
        raise context_exceeded(prompt.field, len(prompt.token_ids), 1, info)
    check_tokens(prompt.field, prompt.token_ids, info)


def check_tokens(field: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    """Raises ApiError (400), naming the first id outside the vocabulary."""
    if max(token_ids, default=0) >= info.vocab_size:
        i = next(i for i, token_id in enumerate(token_ids) if token_id >= info.vocab_size)
        raise _outside_vocabulary(f"{field}.{i}", token_ids[i], info)


def make_requests(
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    *,
    call_id: str,
    chain: tuple[str, ...] | None,
    arrival_s: float,
    info: ModelInfo,
    settings: ApiSettings,
    tenant: str,
    derived: Mapping[str, Any],
    trace: str = "",
) -> list[Request]:
    """``n`` requests per prompt, in the order of the answer's choices. Their seeds do not depend on other prompts.

    Args:
        derived: sampling parameters that are made of the caller's texts.

    Raises ApiError (400, 404) or InvalidField: a field has an invalid value.
    """
    adapter = check_model(fields.model, info)  # it may have been unloaded since the first check
    slo = parse_slo(fields.slo, settings.slo)
    salt = cache_salt("" if settings.share_between_keys else tenant, fields.cache_salt)
    requests: list[Request] = []
    for prompt in prompts:
        seed = secrets.randbits(64) if fields.seed is None else fields.seed & MAX_SEED
        for i in range(fields.n or 1):
            sampling = sampling_params(fields, prompt, choice_seed(seed, i), info, settings, derived)
            request_id = f"{call_id}-{len(requests)}"
            request = Request(
                request_id,
                prompt.token_ids,
                sampling,
                arrival_s,
                slo,
                chain,
                cache_salt=salt,
                trace=trace,
                prediction_token_ids=prompt.prediction_token_ids,
                adapter=adapter,
            )
            requests.append(request)
    return requests


def cache_salt(tenant: str, own: str | None) -> str:
    """``Request.cache_salt`` of a call whose field ``cache_salt`` is ``own``; it reveals neither. Empty: no salt."""
    if not tenant and own is None:
        return ""
    return hashlib.blake2b((own or "").encode("utf-8", "surrogatepass"), digest_size=16, key=tenant.encode()).hexdigest()


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 has the call's seed, as with n = 1; others have a hash of seed and index."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def sampling_params(
    fields: GenerationFields,
    prompt: Prompt,
    seed: int,
    info: ModelInfo,
    settings: ApiSettings,
    derived: Mapping[str, Any],
) -> SamplingParams:
    """The caller's parameters, else the model's defaults. Raises ApiError or InvalidField: a value is out of range."""
    room = info.max_model_len - len(prompt.token_ids)
    limit_field, max_tokens = _token_limit(fields, room, settings)
    if max_tokens > room:
        raise context_exceeded(limit_field, len(prompt.token_ids), min(max_tokens, 2**31), info)
    values: dict[str, Any] = {name: value for name, value in settings.sampling_defaults.items() if name in SCALARS}
    for name in _GIVEN & type(fields).model_fields.keys():
        value = getattr(fields, name)
        if name in SCALARS and value in SCALARS[name][1].off:
            values[name] = None
        elif value is not None:
            is_single = name == "stop" and isinstance(value, str)
            values[name] = (value,) if is_single else tuple(value) if isinstance(value, list) else value
    values |= {"max_tokens": max_tokens, "seed": seed, "logit_bias": _logit_bias(fields, info)}
    values |= {"top_logprobs": _top_logprobs(fields), "prompt_logprobs": _prompt_logprobs(fields), **derived}
    try:
        sampling = SamplingParams(**values)
    except InvalidField as error:
        field = limit_field if error.field == "max_tokens" else error.field
        raise InvalidField(field, error.value, error.reason) from error
    for name, token_ids in sampling.token_ids().items():
        check_tokens(name, token_ids, info)
    return sampling


async def parse_drafting(drafting: str | None, status: Callable[[], Awaitable[ClusterStatus]]) -> tuple[str, ...] | None:
    """``Request.chain`` of the field ``drafting``. Raises ApiError (400) for an unknown drafter or an impossible chain."""
    if drafting is None or drafting == "auto":
        return None
    if drafting == "off":
        return ()
    drafters = {drafter.name: drafter for drafter in (await status()).drafters}
    chain = tuple(name.strip() for name in drafting.split(">"))
    for name in chain:
        if name not in drafters:
            known = ", ".join(map(repr, sorted(drafters))) or "no drafters"
            message = f"{shorten(name)} is not a drafter of this server{nearest(name, drafters)} ('auto', 'off', {known})"
            raise bad_request("drafting", message)
    _check_chain(chain, drafters)
    return chain


def domain_of(fields: GenerationFields, is_structured: bool) -> str:
    """``metadata.domain`` of the call if it is a plain name, else the form of the call: tools, structured, chat or text."""
    named = (fields.metadata or {}).get("domain", "")
    if _DOMAIN.fullmatch(named):
        return named
    if getattr(fields, "tools", None):
        return "tools"
    return "structured" if is_structured else "chat" if isinstance(fields, ChatRequest) else "text"


def parse_slo(slo: str | Objectives | None, config: SloConfig) -> Slo:
    """The objectives of the field ``slo``. Raises ApiError (400) for an unknown class."""
    if isinstance(slo, Objectives):
        return slo.objectives(CUSTOM)
    name = config.default if slo is None else slo
    if name is None:
        return Slo()
    if name not in config.classes:
        known = ", ".join(map(repr, config.classes)) or "there are none"
        message = f"{shorten(name)} is not a class of this server{nearest(name, config.classes)} ({known})"
        raise bad_request("slo", message)
    return config.classes[name].objectives(name)


def _check_chain(chain: tuple[str, ...], drafters: Mapping[str, DrafterStatus]) -> None:
    """Raises ApiError (400) unless each drafter but the last can propose to the next, in the last one's process."""
    last = drafters[chain[-1]]
    proposers = last.proposers
    for i, name in enumerate(chain[:-1]):
        if name not in proposers:
            possible = f"it verifies drafts of {', '.join(proposers)}" if proposers else "it verifies no other drafter"
            raise bad_request("drafting", f"{name} cannot draft for {last.name} on this server: {possible}")
        if i and not drafters[name].verifies:
            raise bad_request("drafting", f"{name} cannot verify, so {chain[i - 1]} cannot draft for it")
    places = [proposers.index(name) for name in chain[:-1]]
    if places != sorted(set(places)):
        order = ", ".join(proposers)
        raise bad_request("drafting", f"must name each drafter once, and those before {last.name} in the order {order}")


def is_limited(fields: GenerationFields) -> bool:
    """Whether the caller, or OpenAI's default, limits the length of answers."""
    return not isinstance(fields, ChatRequest) or (fields.max_completion_tokens or fields.max_tokens) is not None


def _token_limit(fields: GenerationFields, room: int, settings: ApiSettings) -> tuple[str, int]:
    """The limit on generated tokens, and the field that sets it."""
    if isinstance(fields, ChatRequest):
        if fields.max_completion_tokens is not None:
            return "max_completion_tokens", fields.max_completion_tokens
        default = min(room, int(settings.sampling_defaults.get("max_tokens", room)))
    else:
        default = min(room, COMPLETION_MAX_TOKENS)
    if wants_prompt_only(fields):
        return "max_tokens", 1
    return "max_tokens", default if fields.max_tokens is None else fields.max_tokens


def _top_logprobs(fields: GenerationFields) -> int | None:
    if isinstance(fields, ChatRequest):
        return (fields.top_logprobs or 0) if fields.logprobs else None
    return fields.logprobs if isinstance(fields, CompletionRequest) else None


def wants_prompt_only(fields: GenerationFields) -> bool:
    """Whether nothing is to be generated. One token is, since every request has one; it is dropped."""
    asks_for_prompt = isinstance(fields, CompletionRequest) and (bool(fields.echo) or fields.prompt_logprobs is not None)
    return asks_for_prompt and fields.max_tokens == 0


def _prompt_logprobs(fields: GenerationFields) -> int | None:
    """As many as `prompt_logprobs`, and ``logprobs`` where the prompt is repeated, ask for."""
    echoed = fields.logprobs if isinstance(fields, CompletionRequest) and fields.echo else None
    return max((num for num in (fields.prompt_logprobs, echoed) if num is not None), default=None)


def _logit_bias(fields: GenerationFields, info: ModelInfo) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in (fields.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(f"logit_bias.{key[:40]}", "must be a token id, as a string of digits")
        if int(key) >= info.vocab_size:
            raise _outside_vocabulary(f"logit_bias.{key}", int(key), info)
        if not -100.0 <= bias <= 100.0:
            raise bad_request(f"logit_bias.{key}", f"must lie between -100 and 100, got {bias}")
        biases[int(key)] = bias
    return tuple(biases.items())


def _outside_vocabulary(param: str, token_id: int, info: ModelInfo) -> ApiError:
    return bad_request(param, f"{token_id} is not a token id; the largest is {info.vocab_size - 1}")
