"""The whole stack through HTTP, by the official client, on the real model."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.server import ServerProcess
from deploy.local_ray import descendants
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m"
REPETITIVE = "Repeat after me, many times: the grey goose crossed the green field. The grey goose crossed the green field."


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_answers_the_readme_question(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Japan?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": REPETITIVE, "max_tokens": 40, "temperature": 0.8, "seed": 11}
    whole = client.completions.create(**ask)
    stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_drafts_are_accepted_and_counted(client: openai.OpenAI) -> None:
    def drafted() -> bool:
        answer = client.completions.create(model=MODEL, prompt=REPETITIVE, max_tokens=64, temperature=0)
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        return (details.accepted_prediction_tokens or 0) > 0

    eventually(drafted)  # a drafter may be late


def test_choices_logprobs_stop_and_seed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "One, two, three,",
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
        "n": 2,
    }
    two = client.completions.create(**ask, logprobs=2)
    again = client.completions.create(**ask)
    assert [choice.text for choice in two.choices] == [choice.text for choice in again.choices]
    assert two.choices[0].text != two.choices[1].text
    assert len(two.choices[0].logprobs.tokens) == len(two.choices[0].logprobs.token_logprobs) <= 12
    stopped = client.completions.create(
        model=MODEL, prompt="One, two, three, four, five,", max_tokens=40, temperature=0, stop=["eight"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "eight" not in stopped.choices[0].text


def test_an_unknown_model_is_a_404_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-17", prompt="Hello", max_tokens=4)
    assert raised.value.param == "model"


def test_eight_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    def ask(i: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=f"Chapter {i}. It was", max_tokens=24, temperature=0.8 * (i % 2), seed=i
        )
        return answer.choices[0].text

    together: dict[int, str] = {}

    def answer(i: int) -> None:
        together[i] = ask(i)

    threads = [threading.Thread(target=answer, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {i: ask(i) for i in range(8)}


def test_a_caller_that_goes_away_frees_its_blocks(server: ServerProcess) -> None:
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_running") == 0)
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with (
            httpx.Client(base_url=server.url, timeout=60, trust_env=False) as caller,
            caller.stream("POST", "/v1/completions", json=body) as response,
        ):
            pieces = response.iter_raw()
            for _ in range(3):
                next(pieces)
            eventually(lambda: gauge(http, "outrider_target_running") == 1)
        eventually(lambda: gauge(http, "outrider_target_running") == 0)
        assert gauge(http, "outrider_target_kv_usage_ratio") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has these scheduling policies")
def test_only_what_serves_interrupts_others(server: ServerProcess) -> None:
    policies = {process.name()[:15]: os.sched_getscheduler(process.pid) for process in descendants(server.pid)}

    of = {name: policies[name] for name in ("ray::TargetActo", "ray::DrafterAct", "ray::ServeRepli", "haproxy")}
    assert set(of.values()) == {os.SCHED_OTHER}, of
    of = {name: policies[name] for name in ("ray::PoolSuperv", "ray::RouterActo", "raylet", "gcs_server")}
    assert set(of.values()) == {os.SCHED_BATCH}, of
