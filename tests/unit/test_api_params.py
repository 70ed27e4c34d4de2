"""From fields to requests: defaults, seeds, chains, and how much a model is to reason."""

import json
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.client import ClusterStatus, DrafterStatus
from cluster.config import ApiConfig, SloClass, SloConfig
from cluster.config.file import ModelConfig
from cluster.errors import ModelUnavailable
from cluster.sampling_params import MAX_SEED, SamplingParams
from cluster.types import Request, Slo
from deploy.api.errors import ApiError
from deploy.api.params import choice_seed, parse_drafting
from deploy.api.settings import MAX_PROMPTS_BYTES, ApiSettings, sampling_defaults
from tests.support.api import (
    CHAT,
    CHAT_TEMPLATE,
    COMPLETIONS,
    MAX_MODEL_LEN,
    MODEL,
    chat_body,
    completion_body,
    fast_tokenizer,
    serving,
    token_ids,
)


async def requests_of(path: str, body: dict[str, Any], **settings: Any) -> list[Request]:
    async with serving(**settings) as (http, cluster):
        response = await http.post(path, json=body)
        assert response.status_code == HTTPStatus.OK, response.text
        return sorted(cluster.requests, key=lambda request: int(request.id.rpartition("-")[2]))


async def test_defaults_are_openai_s() -> None:
    (chat,) = await requests_of(CHAT, chat_body(seed=1))
    room = MAX_MODEL_LEN - len(chat.prompt_token_ids)
    assert chat.sampling == SamplingParams(max_tokens=room, temperature=1.0, seed=1)
    assert chat.chain is None
    (completion,) = await requests_of(COMPLETIONS, completion_body(seed=1))
    assert completion.sampling == SamplingParams(max_tokens=16, temperature=1.0, seed=1)


async def test_null_means_not_given() -> None:
    names = ("temperature", "top_p", "stop", "n", "max_tokens", "logit_bias", "stream", "response_format", "tools", "user")
    (request,) = await requests_of(CHAT, chat_body(seed=1, **dict.fromkeys(names)))
    assert request.sampling == (await requests_of(CHAT, chat_body(seed=1)))[0].sampling


GENERATION: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 7}


async def test_calls_get_the_sampling_defaults_of_the_model() -> None:
    (chat,) = await requests_of(CHAT, chat_body(seed=1), sampling_defaults=GENERATION)
    assert chat.sampling == SamplingParams(max_tokens=7, temperature=0.6, top_p=0.95, top_k=20, seed=1)
    own = {"temperature": 0, "top_p": 1, "top_k": -1, "max_tokens": 9}
    (chat,) = await requests_of(CHAT, chat_body(seed=1, **own), sampling_defaults=GENERATION)
    assert chat.sampling == SamplingParams(max_tokens=9, temperature=0.0, seed=1)
    (completion,) = await requests_of(COMPLETIONS, completion_body(seed=1), sampling_defaults=GENERATION)
    assert (completion.sampling.max_tokens, completion.sampling.temperature) == (16, 0.6)


async def test_responses_tell_the_sampling_defaults() -> None:
    async with serving(sampling_defaults=GENERATION) as (http, cluster):
        answer = (await http.post("/v1/responses", json={"input": "a"})).json()
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
        assert cluster.requests[0].sampling.top_k == 20


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}, {"temperature": 0.6, "top_k": 20, "max_tokens": 9}),
        ({"repetition_penalty": 1.05, "top_k": 0, "do_sample": True}, {"repetition_penalty": 1.05}),
        ({"eos_token_id": 2, "temperature": None}, {}),
        (None, {}),
    ],
)
def test_sampling_defaults_are_read_from_the_model(tmp_path: Path, raw: Any, expected: dict[str, Any]) -> None:
    if raw is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert sampling_defaults(ModelConfig(), tmp_path) == expected
    assert sampling_defaults(ModelConfig(generation_config="none"), tmp_path) == {}


@pytest.mark.parametrize("text", ["{", '{"temperature": "warm"}', '{"top_p": 7}'])
def test_unusable_sampling_defaults_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelUnavailable, match="generation_config"):
        sampling_defaults(ModelConfig(), tmp_path)
    assert sampling_defaults(ModelConfig(generation_config="none"), tmp_path) == {}


async def test_every_parameter_arrives() -> None:
    fields = {
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"7": -100, "8": 1.5},
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 3,
        "drafting": "small",
    }
    (request,) = await requests_of(CHAT, chat_body(**fields))
    assert request.sampling == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias=((7, -100.0), (8, 1.5)),
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        min_tokens=2,
        ignore_eos=True,
        seed=5,
        top_logprobs=3,
    )
    assert request.chain == ("small",)


@pytest.mark.parametrize(("drafting", "chain"), [("auto", None), ("off", ()), ("ngram", ("ngram",))])
async def test_drafting_names_the_chain(drafting: str, chain: tuple[str, ...] | None) -> None:
    (request,) = await requests_of(CHAT, chat_body(drafting=drafting))
    assert request.chain == chain


async def chained_status() -> ClusterStatus:
    """A lookup, a drafter that verifies it, and one that verifies both."""
    lookup = DrafterStatus("ngram", "ngram", "ready", 0, 0, 0, None)
    small = replace(lookup, name="small", kind="model", verifies=True, proposers=("ngram",))
    big = replace(lookup, name="big", kind="model", verifies=True, proposers=("ngram", "other", "small"))
    return ClusterStatus("m", "chain", 1, (), (lookup, replace(lookup, name="other"), small, big))


@pytest.mark.parametrize("drafting", ["ngram>big", "small>big", "ngram>small>big", "ngram > small", "big"])
async def test_drafting_names_a_chain_where_there_are_chains(drafting: str) -> None:
    assert await parse_drafting(drafting, chained_status) == tuple(drafting.replace(" ", "").split(">"))


@pytest.mark.parametrize(
    ("drafting", "says"),
    [
        ("ngram>bog", r"'bog' is not a drafter of this server; did you mean 'big'\?"),
        ("big>small", r"big cannot draft for small on this server: it verifies drafts of ngram"),
        ("small>ngram", r"small cannot draft for ngram on this server: it verifies no other drafter"),
        ("ngram>other>big", r"other cannot verify, so ngram cannot draft for it"),
        ("ngram>ngram>small", r"ngram cannot verify"),
        ("small>small>big", r"must name each drafter once, and those before big in the order ngram, other, small"),
        ("ngram>", r"is not a drafter of this server"),
    ],
)
async def test_a_chain_that_cannot_be_is_refused_with_what_can(drafting: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        await parse_drafting(drafting, chained_status)
    assert (refused.value.status, refused.value.param) == (HTTPStatus.BAD_REQUEST, "drafting")


async def test_ignored_fields_change_nothing() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False}
    empty = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    (request,) = await requests_of(CHAT, chat_body(seed=1, **ignored, **empty))
    (plain,) = await requests_of(CHAT, chat_body(seed=1))
    assert request.sampling == plain.sampling
    assert request.prompt_token_ids == plain.prompt_token_ids


async def test_messages_go_through_the_chat_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "four", "tool_call_id": "x"},
    ]
    (request,) = await requests_of(CHAT, chat_body(messages=messages))
    text = (
        "<|start|>system\nbe brief<|end|>\n<|start|>user\none\ntwo<|end|>\n<|start|>assistant\nthree<|end|>\n"
        "<|start|>user\n<tool_response>\nfour\n</tool_response><|end|>\n<|start|>assistant\n"
    )
    assert request.prompt_token_ids == token_ids(text)


async def test_prompts_in_all_four_forms() -> None:
    for prompt, expected in (
        ("the answer", [token_ids("the answer")]),
        (["the answer", "café"], [token_ids("the answer"), token_ids("café")]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ):
        requests = await requests_of(COMPLETIONS, completion_body(prompt=prompt))
        assert [request.prompt_token_ids for request in requests] == expected


async def test_choices_have_seeds_of_their_own_and_the_first_the_seed_itself() -> None:
    requests = await requests_of(COMPLETIONS, completion_body(prompt=["a", "b"], n=3, seed=11))
    seeds = [request.sampling.seed for request in requests]
    assert seeds[:3] == seeds[3:]  # a prompt gets the same choices alone and in a list
    assert seeds[0] == 11
    assert len(set(seeds[:3])) == 3
    assert len({request.id for request in requests}) == 6


async def test_a_negative_seed_is_a_seed() -> None:
    (negative,) = await requests_of(CHAT, chat_body(seed=-1))
    (largest,) = await requests_of(CHAT, chat_body(seed=MAX_SEED))
    assert negative.sampling.seed == largest.sampling.seed == MAX_SEED


async def test_without_a_seed_every_call_differs() -> None:
    seeds = {(await requests_of(CHAT, chat_body()))[0].sampling.seed for _ in range(5)}
    assert len(seeds) == 5


@given(st.integers(0, MAX_SEED), st.integers(0, 15))
def test_choice_seeds_are_valid_and_stable(seed: int, index: int) -> None:
    derived = choice_seed(seed, index)
    assert 0 <= derived <= MAX_SEED
    assert derived == choice_seed(seed, index)
    assert (derived == seed) == (index == 0)


def test_settings_follow_the_configuration() -> None:
    config = ApiConfig(api_keys_file=Path("keys"), max_concurrent_requests=8)
    settings = ApiSettings.from_config(config)
    assert settings.max_concurrent == 8
    assert settings.for_len(2048) == settings
    for max_model_len, num_bytes in ((2**15, 8 * 16 * 2**15), (2**20, MAX_PROMPTS_BYTES), (2**23, 16 * 2**23)):
        long = settings.for_len(max_model_len)
        assert long.max_request_bytes == num_bytes <= long.max_held_bytes / 2
    assert settings.max_n == settings.max_sequences == 8
    assert settings.api_keys_file == Path("keys")


SLO = SloConfig(classes={"interactive": SloClass(ttft_ms=500, tpot_ms=50), "batch": SloClass()}, default="batch")


@pytest.mark.parametrize(
    ("field", "slo"),
    [
        (None, Slo(None, None, "batch")),
        ("batch", Slo(None, None, "batch")),
        ("interactive", Slo(0.5, 0.05, "interactive")),
        ({"ttft_ms": 100}, Slo(0.1, None, "custom")),
        ({"ttft_ms": None, "tpot_ms": 20.5}, Slo(None, 0.0205, "custom")),
    ],
)
async def test_objectives_are_a_class_or_of_the_call(field: Any, slo: Slo) -> None:
    responses = {"model": MODEL, "input": "what is it?", "slo": field}
    for path, body in (
        (CHAT, chat_body(slo=field)),
        (COMPLETIONS, completion_body(slo=field)),
        ("/v1/responses", responses),
        ("/v1/messages", chat_body(slo=field, max_tokens=5)),
    ):
        (request,) = await requests_of(path, body, slo=SLO)
        assert request.slo == slo


async def test_without_classes_requests_have_no_objectives_and_name_none() -> None:
    (request,) = await requests_of(CHAT, chat_body())
    assert request.slo == Slo()
    async with serving(slo=SLO) as (http, cluster):
        answer = await http.post(CHAT, json=chat_body(slo="interactiv"))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (HTTPStatus.BAD_REQUEST, "slo")
        assert error["message"] == (
            "slo: 'interactiv' is not a class of this server; did you mean 'interactive'? ('interactive', 'batch')"
        )
        assert not cluster.requests


EFFORT = "{{ reasoning_effort | default('medium') }}\n"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


async def asked(template: str, path: str, body: dict[str, Any]) -> tuple[str, httpx.Response]:
    """The prompt's text, and the answer."""
    async with serving(None, template, 4096) as (http, cluster):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        ids = list(cluster.requests[0].prompt_token_ids)
        return fast_tokenizer().decode(ids, skip_special_tokens=False), response


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", "some other"])
async def test_the_template_is_told_the_effort(effort: str) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body(reasoning_effort=effort)),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": effort}}),
    ):
        text, response = await asked(EFFORT + CHAT_TEMPLATE, path, body)
        assert text.startswith(f"{effort}\n")
        assert "x-outrider-warning" not in response.headers
        text, _ = await asked(CHAT_TEMPLATE + THINKING, path, body)
        assert text.endswith("<think></think>") == (effort == "none")


async def test_the_caller_s_own_variables_come_first() -> None:
    own = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}
    text, _ = await asked(EFFORT + CHAT_TEMPLATE + THINKING, "/v1/chat/completions", chat_body(**own))
    assert text.startswith("low\n")
    assert text.endswith("<think></think>")


async def test_an_effort_of_which_the_template_knows_nothing_is_named() -> None:
    for path, body, name in (
        ("/v1/chat/completions", chat_body(reasoning_effort="high"), "reasoning_effort"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ):
        _, response = await asked(CHAT_TEMPLATE, path, body)
        assert response.headers["x-outrider-warning"] == f"fields without effect: {name}"
