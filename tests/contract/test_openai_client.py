"""The official ``openai`` client against a real HTTP server, over a scripted cluster and over real models."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from cluster.client import EngineClient
from cluster.errors import LinkClosed, Overloaded
from cluster.types import PREDICTION, ModelInfo, Request, TokenLogprobs
from deploy.api.tokenizer import Tokenizer
from engine.telemetry import Telemetry
from router.cost_model import TableCost
from tests.support.api import app_of, finishing, listening, model_info, token_ids, tokenizer
from tests.support.scripted import ScriptedClient, Step
from tests.support.waiting import eventually

PROMPT = "Name three large cities, and say in one sentence what each of them is known for."
STORY = "Once upon a time there was a"
MAX_TOKENS = 16
COST = TableCost((1, 16), (0.02, 0.04))  # set: measuring it takes longer than most tests here, and none asks for it


@dataclass(frozen=True)
class Served:
    openai: OpenAI
    model: str
    http: httpx.Client
    tokenizer: Tokenizer
    target: Telemetry | None  # None: a script

    def chat(self, **fields: Any) -> ChatCompletion:
        fields = {"max_completion_tokens": MAX_TOKENS, "seed": 1, **fields}
        answer = self.openai.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": PROMPT}], **fields
        )
        assert isinstance(answer, ChatCompletion)
        return answer

    def text(self, **fields: Any) -> str:
        return self.chat(**fields).choices[0].message.content or ""

    def stream(self, **fields: Any) -> list[Any]:
        fields = {"max_completion_tokens": MAX_TOKENS, "seed": 1, **fields}
        messages: Any = [{"role": "user", "content": PROMPT}]
        with self.openai.chat.completions.create(model=self.model, messages=messages, stream=True, **fields) as stream:
            return list(stream)


def scripted_answer(request: Request) -> list[Step]:
    """Like a model's: a function of prompt and seed alone, whatever drafts."""
    if request.prompt_token_ids == (0, 0):
        return [Overloaded("too many wait", 1.0)]
    if request.prompt_token_ids == (0, 1):
        return [LinkClosed("no target")]
    digest = hashlib.sha256(repr((request.prompt_token_ids, request.sampling.seed)).encode()).hexdigest()
    ids = token_ids(f"Tōkyō ❤️ is {digest}, and the answer to another")
    drafter = None if request.chain == () else "ngram"
    return [
        replace(commit, logprobs=tuple(TokenLogprobs(-0.1, ((i, -0.1), (0, -9.0))) for i in commit.token_ids))
        for commit in finishing(request, ids, num_per_round=3, drafter=drafter)
    ]


@contextmanager
def scripted_cluster() -> Iterator[tuple[EngineClient, Tokenizer, ModelInfo, None]]:
    yield ScriptedClient(model_info(), scripted_answer), tokenizer(), model_info(), None


@contextmanager
def embedded_cluster(folder: Path) -> Iterator[tuple[EngineClient, Tokenizer, ModelInfo, Telemetry]]:
    """A real model with a real drafter, in this process."""
    from benchmarks.embedded import EmbeddedCluster, PoolEntry
    from drafters.ngram import NgramDrafter
    from engine.factory import load_target
    from engine.models.config import load_config
    from engine.models.tokenizer import fingerprint

    target = load_target(folder, dtype="float32", kv_cache_bytes=2**26, max_num_sequences=8, max_model_len=512)
    config = load_config(folder)
    info = ModelInfo("embedded", config.vocab_size, 512, config.eos_token_ids, fingerprint(folder))
    pool = {"ngram": PoolEntry(NgramDrafter())}
    with EmbeddedCluster(target, info, COST, pool) as cluster:
        yield cluster.client, Tokenizer.from_folder(folder), info, cluster.loop.telemetry


@pytest.fixture(scope="module", params=["scripted", "tiny", pytest.param("smollm2", marks=pytest.mark.model)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with ExitStack() as stack:
        match request.param:
            case "scripted":
                opened = scripted_cluster()
            case "tiny":
                opened = embedded_cluster(request.getfixturevalue("tiny_model_folder"))
            case _:
                opened = embedded_cluster(request.getfixturevalue("model_folder"))
        client, words, info, target = stack.enter_context(opened)
        app = app_of(client, words, max_request_bytes=100_000, status_ttl_s=1e-6)  # figures of the target as they are now
        address = stack.enter_context(listening(app))
        api = stack.enter_context(OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0))
        http = stack.enter_context(httpx.Client(base_url=address))
        yield Served(api, info.name, http, words, target)


def test_the_model_is_listed(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == [served.model]
    assert served.openai.models.retrieve(served.model).id == served.model


def test_a_chat(served: Served) -> None:
    answer = served.chat()
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= MAX_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint


def test_a_stream_says_what_the_whole_answer_says(served: Served) -> None:
    whole = served.chat()
    *chunks, last = served.stream(stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_whole_and_streamed(served: Served) -> None:
    fields: dict[str, Any] = {"model": served.model, "prompt": STORY, "max_tokens": MAX_TOKENS, "seed": 2}
    whole = served.openai.completions.create(**fields)
    assert whole.choices[0].text
    with served.openai.completions.create(stream=True, **fields) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_prompts_as_token_ids_and_in_lists(served: Served) -> None:
    ids = [5, 6, 7, 8, 9]
    fields: dict[str, Any] = {"model": served.model, "max_tokens": 8, "seed": 3}
    alone = served.openai.completions.create(prompt=ids, **fields).choices[0].text
    listed = served.openai.completions.create(prompt=[ids, ids[:3]], **fields)
    assert [choice.index for choice in listed.choices] == [0, 1]
    assert listed.choices[0].text == alone


def test_the_seed_decides(served: Served) -> None:
    assert served.text(seed=7) == served.text(seed=7)
    assert len({served.text(seed=seed) for seed in (-1, 7, 8, 2**63)}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_changes_nothing(served: Served, temperature: float) -> None:
    texts = {
        served.text(temperature=temperature, extra_body={"drafting": drafting}) for drafting in ("auto", "off", "ngram")
    }
    assert len(texts) == 1


def test_drafting_off_drafts_nothing(served: Served) -> None:
    answer = served.chat(extra_body={"drafting": "off"})
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_predicted_output_changes_nothing(served: Served, temperature: float) -> None:
    text = served.text(temperature=temperature)
    for predicted in (text, "Something else. " * 40, text[len(text) // 2 :], ""):
        answer = served.chat(temperature=temperature, prediction={"type": "content", "content": predicted})
        assert answer.choices[0].message.content == text


@pytest.mark.model
def test_a_predicted_output_is_accepted_and_counted(model_folder: Path) -> None:
    with ExitStack() as stack:
        client, words, info, target = stack.enter_context(embedded_cluster(model_folder))
        address = stack.enter_context(listening(app_of(client, words)))
        api = stack.enter_context(OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0))
        http = stack.enter_context(httpx.Client(base_url=address))
        served = Served(api, info.name, http, words, target)
        text = served.text(max_completion_tokens=40)
        answer = served.chat(max_completion_tokens=40, prediction={"type": "content", "content": text})
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens or 0) > answer.usage.completion_tokens * 0.6
        assert target.drafter(PREDICTION).num_accepted == details.accepted_prediction_tokens


def test_drafting_details_cover_the_text(served: Served) -> None:
    chunks = served.stream(extra_body={"drafting_details": True, "drafting": "ngram"})
    segments = [s for chunk in chunks for s in (chunk.model_extra.get("outrider") or {}).get("segments", ())]
    assert "".join(segment["text"] for segment in segments) == served.text()
    acceptance = chunks[-1].model_extra["outrider"]["acceptance"]
    assert acceptance["mean_accepted_len"] >= 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen_whatever_drafts(served: Served, temperature: float) -> None:
    if served.model == "scripted":
        pytest.skip("a script chooses no tokens")
    allowed = [11, 17, 23, 42]
    answers = [
        served.chat(
            temperature=temperature,
            extra_body={"allowed_token_ids": allowed, "return_token_ids": True, "drafting": drafting},
        )
        for drafting in ("off", "ngram")
    ]
    first, second = [answer.choices[0].model_extra["token_ids"] for answer in answers]
    assert first == second
    assert len(first) == MAX_TOKENS
    assert set(first) <= set(allowed)


def test_cached_tokens_are_those_of_the_prefix_cache(served: Served) -> None:
    if served.model == "scripted":
        pytest.skip("a script has no prefix cache")
    before = metric(served, "outrider_prefix_cache_hits_total")
    prompt = [20 + (7 * i) % 200 for i in range(100)]
    cached = []
    for ids in (prompt, prompt, [*prompt[:70], *prompt[:30]]):
        usage = served.openai.completions.create(model=served.model, prompt=ids, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    block_len = 32
    assert cached == [0, 100 // block_len * block_len, 70 // block_len * block_len]
    assert metric(served, "outrider_prefix_cache_hits_total") - before == sum(cached)


def test_how_speculative_decoding_went(served: Served) -> None:
    answer = served.chat(extra_body={"drafting": "ngram"})
    told = answer.model_extra["metrics"]["speculative_decoding"]
    acceptance = answer.model_extra["outrider"]["acceptance"]
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] <= acceptance["num_rounds"]
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    assert told["num_accepted_draft_tokens"] == acceptance["num_accepted"]
    assert told["num_draft_tokens"] == acceptance["num_proposed"]


def test_two_choices(served: Served) -> None:
    alone = served.text(seed=9)
    first, second = served.chat(seed=9, n=2).choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content == alone
    assert second.message.content != alone
    streamed = {0: "", 1: ""}
    for chunk in served.stream(seed=9, n=2):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == {0: first.message.content, 1: second.message.content}


def test_a_stop_string_ends_before_itself(served: Served) -> None:
    plain = served.text()
    stop = plain[len(plain) // 2 :][:3]
    answer = served.chat(stop=[stop, "\x00 never \x00"])
    assert answer.choices[0].message.content == plain[: plain.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = served.stream(stop=stop)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == plain[: plain.index(stop)]


def test_logprobs_of_a_chat(served: Served) -> None:
    answer = served.chat(logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelled = bytes(byte for token in choice.logprobs.content for byte in token.bytes or ())
    assert spelled.decode("utf-8", errors="replace") == choice.message.content
    assert all(token.logprob <= 0.0 for token in choice.logprobs.content)
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    streamed = [
        t for c in served.stream(logprobs=True, top_logprobs=2) for t in (c.choices[0].logprobs or NO_LOGPROBS).content
    ]
    assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]


class _NoLogprobs:
    content: tuple[()] = ()


NO_LOGPROBS = _NoLogprobs()


def test_logprobs_of_a_completion(served: Served) -> None:
    answer = served.openai.completions.create(model=served.model, prompt=STORY, max_tokens=6, logprobs=2, seed=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs or ())
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def refused_by(ask: Callable[[], object], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    with pytest.raises(kind) as raised:
        ask()
    return raised.value


def test_errors_have_the_client_s_classes(served: Served) -> None:
    wrong = refused_by(lambda: served.chat(temperature=3.0), openai.BadRequestError)
    assert (wrong.param, wrong.type) == ("temperature", "invalid_request_error")
    unsupported = refused_by(lambda: served.chat(extra_body={"use_beam_search": True}), openai.BadRequestError)
    assert unsupported.param == "use_beam_search"
    unknown = served.openai.completions.create
    assert refused_by(lambda: unknown(model="gpt-17", prompt="a"), openai.NotFoundError).code == "model_not_found"
    large = refused_by(lambda: unknown(model=served.model, prompt="a" * 200_000), openai.APIStatusError)
    assert large.status_code == 413
    long = refused_by(lambda: unknown(model=served.model, prompt=[1] * 600), openai.BadRequestError)
    assert long.code == "context_length_exceeded"
    assert served.text()


def metric(served: Served, name: str) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_a_stream_left_early_is_aborted(served: Served) -> None:
    """The target is empty again although most of the tokens asked for were never made."""
    if served.target is None:
        pytest.skip("a script has no target that could go on working")
    num_before = served.target.num_committed
    fields: dict[str, Any] = {"model": served.model, "prompt": [7] * 8, "max_tokens": 400, "stream": True, "n": 4}
    with served.openai.completions.create(**fields, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        eventually(lambda: metric(served, "outrider_target_running") > 0.0)
    eventually(lambda: metric(served, "outrider_target_running") == 0.0)
    assert 0 < served.target.num_committed - num_before < 4 * 400
    assert served.text()


def test_limits_and_outages_have_the_client_s_classes() -> None:
    app = app_of(ScriptedClient(model_info(), scripted_answer))
    with listening(app) as address, OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as api:
        ask = api.completions.create
        full = refused_by(lambda: ask(model="scripted", prompt=[0, 0]), openai.RateLimitError)
        assert full.response.headers["retry-after"] == "1"
        gone = refused_by(lambda: ask(model="scripted", prompt=[0, 1]), openai.InternalServerError)
        assert gone.status_code == 503


def test_keys_are_asked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    app = app_of(ScriptedClient(model_info(), scripted_answer), api_keys_file=keys)
    with listening(app) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="sk-wrong", max_retries=0) as api:
            assert refused_by(api.models.list, openai.AuthenticationError).code == "invalid_api_key"
        with OpenAI(base_url=f"{address}/v1", api_key="sk-right", max_retries=0) as api:
            assert len(list(api.models.list())) == 1
