"""OpenAI's predicted outputs: what a target is sent of them, and how their tokens are counted."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import fastapi
import pytest

from cluster.types import PREDICTION, Request
from deploy.api import errors, prompts, schema
from tests.support.api import MAX_MODEL_LEN, chat_body, finishing, model_info, serving, token_ids, tokenizer
from tests.support.scripted import Step

CHAT = "/v1/chat/completions"
TEXT = "the answer is forty-two"


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


async def sent(**fields: Any) -> Request:
    """The request that a call becomes."""
    found: list[Request] = []

    def script(request: Request) -> Iterable[Step]:
        found.append(request)
        return finishing(request, token_ids(TEXT))

    async with serving(script) as (http, _):
        response = await http.post(CHAT, json=chat_body(**fields))
        assert response.status_code == 200, response.text
    return found[-1]


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (content(TEXT), TEXT),
        (content([{"type": "text", "text": "the answer"}, {"type": "text", "text": "is here"}]), "the answer\nis here"),
        (content(""), ""),
        (None, ""),
    ],
)
async def test_the_target_gets_the_tokens_of_the_text(prediction: object, text: str) -> None:
    assert (await sent(prediction=prediction)).prediction_token_ids == token_ids(text)


async def test_all_choices_get_it() -> None:
    assert (await sent(prediction=content(TEXT), n=3)).prediction_token_ids == token_ids(TEXT)


async def test_one_that_is_longer_than_the_context_has_room_for_is_cut() -> None:
    text = "an answer " * MAX_MODEL_LEN
    request = await sent(prediction=content(text))
    room = MAX_MODEL_LEN - len(request.prompt_token_ids)
    assert request.prediction_token_ids == token_ids(text)[:room]


@pytest.mark.parametrize(("prediction", "expected"), [(content(TEXT), (4, 2)), (None, (7, 4))])
async def test_with_a_prediction_usage_counts_its_tokens_alone(prediction: object, expected: tuple[int, int]) -> None:
    def script(request: Request) -> Iterable[Step]:
        first, second, *rest = finishing(request, token_ids(TEXT * 3), num_per_round=5, drafter=None)
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
