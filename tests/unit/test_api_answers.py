"""What answers look like: whole and streamed, usage, log-probabilities, drafting, and predicted outputs."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import fastapi
import pytest
from pydantic import TypeAdapter

from cluster.client import ClusterStatus
from cluster.types import PREDICTION, Request, TokenLogprobs
from deploy.api import errors, prompts, schema
from tests.support.api import (
    CHAT,
    COMPLETIONS,
    MAX_MODEL_LEN,
    MODEL,
    TEXT,
    ask,
    chat_body,
    chunks_in,
    completion_body,
    finishing,
    model_info,
    saying,
    serving,
    stream,
    token_ids,
    tokenizer,
)
from tests.support.scripted import Step


async def test_a_chat_answer() -> None:
    answer = await ask(CHAT, chat_body())
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"].startswith("fp_")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


async def test_a_completion_cut_by_its_limit() -> None:
    answer = await ask(COMPLETIONS, completion_body(max_tokens=3))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == tokenizer().decode(token_ids(TEXT)[:3])
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_chat_stream_says_who_speaks_then_the_text_then_why_it_ends() -> None:
    first, *rest = await stream(CHAT, chat_body())
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest][-1] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in rest[:-1])
    assert {chunk["object"] for chunk in [first, *rest]} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [first, *rest]}) == 1
    assert all("usage" not in chunk for chunk in rest)


async def test_usage_comes_last_in_a_stream_that_asks_for_it() -> None:
    body = chat_body(stream_options={"include_usage": True})
    *chunks, last = await stream(CHAT, body)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == (await ask(CHAT, chat_body()))["usage"]


async def test_usage_counts_prompts_once_and_drafts() -> None:
    answer = await ask(COMPLETIONS, completion_body(prompt=[[1, 2], [3]], n=2, max_tokens=64), num_per_round=4)
    num_tokens = len(token_ids(TEXT)) + 1
    num_bonus = -(-num_tokens // 4)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4 * num_tokens,
        "total_tokens": 3 + 4 * num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 4 * (num_tokens - num_bonus),
            "rejected_prediction_tokens": 0,
        },
    }
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


async def test_rejected_drafts_are_counted() -> None:
    def script(request: Request) -> Iterable[Step]:
        for commit in finishing(request, token_ids("the answer"), num_per_round=2, drafter="ngram"):
            yield replace(commit, num_proposed=5, drafter="ngram")

    async with serving(script) as (http, _):
        answer = (await http.post(CHAT, json=chat_body())).json()
    details = answer["usage"]["completion_tokens_details"]
    acceptance = answer["outrider"]["acceptance"]
    num_rounds = acceptance["num_rounds"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == 5 * num_rounds
    assert acceptance["drafters"]["ngram"]["num_proposed"] == 5 * num_rounds
    assert acceptance["mean_accepted_len"] == round(answer["usage"]["completion_tokens"] / num_rounds, 4)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_the_last_object_of_a_stream_tells_how_drafting_went(include_usage: bool) -> None:
    body = chat_body(stream_options={"include_usage": include_usage}, n=2)
    *chunks, last = await stream(CHAT, body)
    assert last["outrider"] == (await ask(CHAT, chat_body(n=2)))["outrider"]
    assert all("outrider" not in chunk for chunk in chunks)


async def test_drafting_details_say_who_drafted_what() -> None:
    chunks = await stream(CHAT, chat_body(drafting_details=True))
    segments = [segment for chunk in chunks for segment in chunk.get("outrider", {}).get("segments", ())]
    assert "".join(segment["text"] for segment in segments) == TEXT
    assert {segment["drafter"] for segment in segments} == {"ngram", None}
    whole = await ask(CHAT, chat_body(drafting_details=True))
    assert whole["outrider"]["segments"] == [segments]
    alone = await ask(CHAT, chat_body(drafting_details=True), drafter=None)
    assert alone["outrider"]["segments"] == [[{"text": TEXT, "drafter": None}]]


async def test_choices_of_a_stream_keep_their_indices() -> None:
    chunks = await stream(CHAT, chat_body(n=3))
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert set(texts.values()) == {TEXT}


@pytest.mark.parametrize("num_per_round", [1, 2, 50])
async def test_a_stop_string_across_tokens_and_rounds(num_per_round: int) -> None:
    body = chat_body(stop=["nother", "🎉, o"])
    chunks = await stream(CHAT, body, num_per_round=num_per_round)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "the answer is naïve ❤️"
    whole = await ask(CHAT, body, num_per_round=num_per_round)
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < len(token_ids(TEXT))


async def test_a_stop_string_ends_the_work_of_the_engine() -> None:
    async with serving(saying(TEXT)) as (http, cluster):
        assert (await http.post(CHAT, json=chat_body(stop="answer"))).status_code == 200
        assert cluster.aborted == [cluster.requests[0].id]


def with_logprobs(request: Request) -> list[Step]:
    steps: list[Step] = []
    for commit in finishing(request, token_ids("the ☃"), num_per_round=2, drafter="ngram"):
        logprobs = tuple(TokenLogprobs(-0.5, ((i, -0.5), (0, float("-inf")))) for i in commit.token_ids)
        steps.append(replace(commit, logprobs=logprobs))
    return steps


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs(streamed: bool) -> None:
    async with serving(with_logprobs) as (http, _):
        body = chat_body(logprobs=True, top_logprobs=2, stream=streamed)
        response = await http.post(CHAT, json=body)
    if streamed:
        chunks = chunks_in(response.text)
        contents = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        tokens = [token for content in contents if content for token in content["content"]]
    else:
        tokens = response.json()["choices"][0]["logprobs"]["content"]
    *text, end = tokens
    assert len(text) == len(token_ids("the ☃"))
    assert bytes(byte for token in text for byte in token["bytes"]).decode() == "the ☃"
    assert (end["token"], end["bytes"]) == ("<|end|>", None)
    first = tokens[0]
    assert (first["token"], first["logprob"]) == (tokenizer().token_name(token_ids("the ☃")[0]), -0.5)
    assert first["top_logprobs"][0] == {name: first[name] for name in ("token", "logprob", "bytes")}
    assert first["top_logprobs"][1]["logprob"] == -9999.0


async def test_completion_logprobs() -> None:
    async with serving(with_logprobs) as (http, _):
        response = await http.post(COMPLETIONS, json=completion_body(logprobs=2))
    logprobs = response.json()["choices"][0]["logprobs"]
    ids = token_ids("the ☃")
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(ids) + 1
    assert set(logprobs["token_logprobs"]) == {-0.5}
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert any(name.startswith("bytes:\\x") for name in logprobs["tokens"])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "ending",
    [
        {},
        {"ignore_eos": True},
        {"max_tokens": 3},
        {"stop": ["e ☃"]},
        {"stop": [" ☃"]},
        {"stop": [" ☃"], "include_stop_str_in_output": True},
        {"stop_token_ids": [token_ids("☃")[0]]},
        {"stop_token_ids": [token_ids("☃")[0]], "include_stop_str_in_output": True},
    ],
    ids=str,
)
async def test_each_token_has_one_log_probability_however_an_answer_ends(
    ending: dict[str, Any], path: str, streamed: bool
) -> None:
    is_chat = path == CHAT
    body = chat_body(logprobs=True) if is_chat else completion_body(logprobs=1)
    body |= {"stream": streamed, "return_token_ids": True, **ending}
    async with serving(with_logprobs) as (http, _):
        response = await http.post(path, json=body | ({"stream_options": {"include_usage": True}} if streamed else {}))
    answers = chunks_in(response.text) if streamed else [response.json()]
    num_tokens = 0
    for choice in [choice for answer in answers for choice in answer["choices"] if choice["logprobs"]]:
        logprobs = choice["logprobs"]
        entries = [one["logprob"] for one in logprobs["content"]] if is_chat else logprobs["token_logprobs"]
        assert entries == [-0.5] * len(choice["token_ids"])
        num_tokens += len(entries)
    assert num_tokens == answers[-1]["usage"]["completion_tokens"] > 0


async def test_models() -> None:
    async with serving() as (http, _):
        listed = (await http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [MODEL]
        assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]


async def test_the_cluster_s_status() -> None:
    async with serving() as (http, cluster):
        response = await http.get("/v1/outrider/status")
        assert TypeAdapter(ClusterStatus).validate_json(response.content) == await cluster.status()


PREDICTED = "the answer is forty-two"


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


async def sent(**fields: Any) -> Request:
    """The request that a call becomes."""
    found: list[Request] = []

    def script(request: Request) -> Iterable[Step]:
        found.append(request)
        return finishing(request, token_ids(PREDICTED))

    async with serving(script) as (http, _):
        response = await http.post(CHAT, json=chat_body(**fields))
        assert response.status_code == 200, response.text
    return found[-1]


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (content(PREDICTED), PREDICTED),
        (content([{"type": "text", "text": "the answer"}, {"type": "text", "text": "is here"}]), "the answer\nis here"),
        (content(""), ""),
        (None, ""),
    ],
)
async def test_the_target_gets_the_tokens_of_the_text(prediction: object, text: str) -> None:
    assert (await sent(prediction=prediction)).prediction_token_ids == token_ids(text)


async def test_all_choices_get_it() -> None:
    assert (await sent(prediction=content(PREDICTED), n=3)).prediction_token_ids == token_ids(PREDICTED)


async def test_one_that_is_longer_than_the_context_has_room_for_is_cut() -> None:
    text = "an answer " * MAX_MODEL_LEN
    request = await sent(prediction=content(text))
    room = MAX_MODEL_LEN - len(request.prompt_token_ids)
    assert request.prediction_token_ids == token_ids(text)[:room]


@pytest.mark.parametrize(("prediction", "expected"), [(content(PREDICTED), (4, 2)), (None, (7, 4))])
async def test_with_a_prediction_usage_counts_its_tokens_alone(prediction: object, expected: tuple[int, int]) -> None:
    def script(request: Request) -> Iterable[Step]:
        first, second, *rest = finishing(request, token_ids(PREDICTED * 3), num_per_round=5, drafter=None)
        yield replace(first, num_proposed=6, num_accepted=4, drafter=PREDICTION)
        yield replace(second, num_proposed=5, num_accepted=3, drafter="ngram")
        yield from rest

    async with serving(script) as (http, _):
        answer = (await http.post(CHAT, json=chat_body(prediction=prediction, max_tokens=64))).json()
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == expected
    assert set(answer["outrider"]["acceptance"]["drafters"]) == {PREDICTION, "ngram"}


async def test_a_text_of_far_too_many_tokens_is_a_bad_request() -> None:
    """Normalisation may make more of a text than it has bytes."""

    async def now(_: object, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    fields = schema.ChatRequest.model_validate(chat_body(prediction=content("an answer " * 10_000)))
    encoder = prompts.Prompts(tokenizer(), now, max_request_bytes=10)
    with pytest.raises(errors.ApiError) as refused:
        await encoder.prediction(fastapi.Request({"type": "http"}), fields, 1, model_info())
    assert (refused.value.status, refused.value.param) == (400, "prediction")
