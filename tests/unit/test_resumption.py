"""Requests whose target is lost go on at another one with the same tokens."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors import resumption
from actors.gateway import LinkClient
from actors.resumption import Resumption
from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import ApiConfig, DrafterConfig, NgramOptions
from cluster.errors import LinkClosed, LinkFull
from cluster.messages import Message, SubmitRound
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.transport.dialer import MAX_PAUSE_S
from cluster.transport.memory import MemoryLink
from cluster.types import Commit, FinishReason, ModelInfo, Request, Slo, TokenLogprobs
from drafters.registry import make_drafter
from engine.factory import load_target
from engine.native import NativeTarget
from router.cost_model import TableCost
from router.plan import Span
from tests.support.quick import first
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow  # together they take seconds

EOS = 256
MODEL = ModelInfo("tiny", EOS + 1, 512, (EOS,), "tiny")
COST = TableCost((1, 64), (0.02, 0.03))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 9}, "colour": {"enum": ["red", "green"]}},
    "required": ["name", "colour"],
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
WAIT_S = 60.0


class HaltingTarget:
    """Stands still in the pass after ``num_left`` more sampled ones, until ``goes_on`` is set."""

    def __init__(self, engine: NativeTarget) -> None:
        self.engine = engine
        self.num_left: int | None = None  # None: it does not halt
        self.halted, self.goes_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        if self.num_left == 0:
            self.halted.set()
            assert self.goes_on.wait(WAIT_S)
            raise FloatingPointError("the device is gone")
        if self.num_left is not None and any(span.samples for span in spans):
            self.num_left -= 1
        return self.engine.execute(spans)


@pytest.fixture(scope="module")
def engines(tiny_model_folder: Path) -> list[NativeTarget]:
    """Two replicas."""
    loaded = [load_target(tiny_model_folder, dtype="float32", kv_cache_bytes=2**22, max_model_len=512) for _ in range(2)]
    return [engine for engine in loaded if isinstance(engine, NativeTarget)]


@contextmanager
def served(engine: NativeTarget | HaltingTarget) -> Iterator[EmbeddedCluster]:
    entry = PoolEntry(make_drafter(DrafterConfig(name="lookup", options=NgramOptions()), MODEL))
    cluster = EmbeddedCluster(engine, MODEL, COST, {"lookup": entry}, grammars=engine.grammars)  # type: ignore[arg-type]
    yield cluster
    try:
        cluster.close()
    except RuntimeError as error:
        if "the device is gone" not in str(error):
            raise


class Replicas:
    """``first`` halts after some passes; requests go there until ``link_both``."""

    def __init__(self, engines: Sequence[NativeTarget], stack: ExitStack, resume_wait_s: float = 0.0) -> None:
        self.engine = HaltingTarget(engines[0])
        stack.callback(self.engine.goes_on.set)
        self.second = stack.enter_context(served(engines[1]))
        self.first = stack.enter_context(served(self.engine))
        stack.callback(self.engine.goes_on.set)
        addresses = [self.first.address]
        self.client = LinkClient("both", MODEL, addresses, self.first.client.status, resume_wait_s=resume_wait_s)
        assert self.client.wait_linked(WAIT_S)

    async def lose_first(self, num_passes: int) -> None:
        """Once requests have been computed for so many passes, all of their commits are sent, and the second is linked."""
        assert await asyncio.to_thread(self.engine.halted.wait, WAIT_S)
        self.link_both()
        self.first.hang_up()

    def link_both(self) -> None:
        self.client.set_addresses([self.first.address, self.second.address])
        assert self.client.wait_linked(WAIT_S, num_targets=2)

    async def num_resumed(self) -> int:
        return (await self.client.status()).num_resumed


@pytest.fixture
def replicas(engines: list[NativeTarget], request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(engines, stack, getattr(request, "param", 0.0))
    for engine in engines:
        engine.check_integrity()


patient = pytest.mark.parametrize("replicas", [10 * WAIT_S], indirect=True)  # seconds


def request(i: int, **parameters: Any) -> Request:
    sampling = SamplingParams(
        **{"max_tokens": 40, "temperature": 0.9 * (i % 2), "seed": i, "ignore_eos": True, **parameters}
    )
    return Request(f"r{i}", (1, 2, *range(i % 12)), sampling, float(i))


async def answer(commits: AsyncIterator[Commit]) -> list[Commit]:
    return [commit async for commit in commits]


def tokens(commits: Sequence[Commit]) -> list[int]:
    return [token for commit in commits for token in commit.token_ids]


def scores(commits: Sequence[Commit], prompt: bool = False) -> list[float]:
    """The log-probability of each token, then those of the most probable ones."""
    found: list[TokenLogprobs] = []
    for commit in commits:
        found += commit.prompt_logprobs if prompt else commit.logprobs
    return [one.logprob for one in found] + [value for one in found for _, value in one.top]


async def disturbed(replicas: Replicas, requests: Sequence[Request], num_passes: int) -> list[list[Commit]]:
    """The answers if the first target is lost after so many passes."""
    replicas.engine.num_left = num_passes
    answers = [asyncio.create_task(answer(replicas.client.generate(one))) for one in requests]
    await replicas.lose_first(num_passes)
    async with asyncio.timeout(WAIT_S):
        return list(await asyncio.gather(*answers))


async def undisturbed(replicas: Replicas, requests: Sequence[Request]) -> list[list[Commit]]:
    plain = [answer(replicas.second.client.generate(replace(one, id=f"plain-{one.id}"))) for one in requests]
    async with asyncio.timeout(WAIT_S):
        return list(await asyncio.gather(*plain))


@pytest.mark.parametrize("num_passes", first(1, [3, 0, 1, 11]))
@pytest.mark.parametrize(
    "parameters",
    first(
        4,
        [
            {},
            {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": ((40, 5.0),)},
            {"top_logprobs": 2, "prompt_logprobs": 1},
            {"stop_token_ids": tuple(range(0, EOS, 9)), "min_tokens": 20},
            {"grammar": JSON, "max_tokens": 60},
            {"grammar": Grammar(GrammarKind.REGEX, "[a-z]{9,12}( [a-z]+){4,6}\\."), "top_logprobs": 0},
        ],
    ),
    ids=lambda parameters: ",".join(parameters) or "plain",
)
async def test_a_lost_target_changes_no_token(replicas: Replicas, parameters: dict[str, Any], num_passes: int) -> None:
    requests = [request(i, **parameters) for i in range(4)]
    found = await disturbed(replicas, requests, num_passes)
    assert await replicas.num_resumed() == len(requests)
    plain = await undisturbed(replicas, requests)
    assert [tokens(commits) for commits in found] == [tokens(commits) for commits in plain]
    assert [commits[-1].finish for commits in found] == [commits[-1].finish for commits in plain]
    for one, commits, plain_commits in zip(requests, found, plain, strict=True):
        assert scores(commits) == pytest.approx(scores(plain_commits), abs=1e-4)
        assert scores(commits, prompt=True) == pytest.approx(scores(plain_commits, prompt=True), abs=1e-4)
        if "top_logprobs" in parameters:
            assert len(scores(commits)) == (1 + parameters["top_logprobs"]) * len(tokens(commits))
        if "prompt_logprobs" in parameters:
            assert len(scores(commits, prompt=True)) == 2 * (len(one.prompt_token_ids) - 1)
    await replicas.client.close()


@pytest.mark.parametrize("spoiled", ["a token less", "another seed"])
async def test_the_comparison_sees_a_wrong_resumption(
    replicas: Replicas, spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Resumption.resume

    def wrong(self: Resumption) -> Request:
        resumed = right(self)
        if spoiled == "a token less":
            return replace(resumed, output_token_ids=resumed.output_token_ids[:-1])
        return replace(resumed, sampling=replace(resumed.sampling, seed=resumed.sampling.seed + 1))

    monkeypatch.setattr(resumption.Resumption, "resume", wrong)
    requests = [request(i, temperature=0.9) for i in range(4)]
    found = await disturbed(replicas, requests, 5)
    plain = await undisturbed(replicas, requests)
    assert [tokens(commits) for commits in found] != [tokens(commits) for commits in plain]
    await replicas.client.close()


async def test_a_failing_engine_gives_its_requests_up_to_another(replicas: Replicas) -> None:
    replicas.engine.num_left = 4
    answers = [asyncio.create_task(answer(replicas.client.generate(request(i)))) for i in range(4)]
    assert await asyncio.to_thread(replicas.engine.halted.wait, WAIT_S)
    replicas.link_both()
    replicas.engine.goes_on.set()
    found = await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
    plain = await undisturbed(replicas, [request(i) for i in range(4)])
    assert [tokens(commits) for commits in found] == [tokens(commits) for commits in plain]
    await replicas.client.close()


async def test_a_resumed_request_is_aborted_where_it_runs(replicas: Replicas) -> None:
    replicas.engine.num_left = 3
    one = request(1, max_tokens=400)
    async with aclosing(replicas.client.generate(one)) as commits:
        await anext(commits)
        await replicas.lose_first(3)
        async for _ in commits:
            if await replicas.num_resumed():
                break
    eventually(lambda: replicas.second.loop.status().num_running == 0, WAIT_S)
    await replicas.client.close()


@pytest.mark.slow
async def test_a_target_that_has_not_noticed_the_loss_of_a_link_continues_its_requests(replicas: Replicas) -> None:
    one = request(1, max_tokens=400)
    async with aclosing(replicas.client.generate(one)) as commits:
        begun = tokens([await anext(commits)])
        resumed = replace(one, output_token_ids=tuple(begun))
        [other] = await answer(replicas.first.client.generate(resumed))
        assert "live already" in (other.error or ""), "it belongs to another gateway"
        redialed = LinkClient("both", MODEL, [replicas.first.address], replicas.first.client.status)
        assert redialed.wait_linked(WAIT_S)
        rest = await answer(redialed.generate(resumed))
        await redialed.close()
    assert begun + tokens(rest) == tokens((await undisturbed(replicas, [one]))[0])
    await replicas.client.close()


@pytest.mark.parametrize("num_passes", [0, 4])  # with 0 it has no output yet
async def test_a_full_queue_takes_a_request_that_was_taken_before(replicas: Replicas, num_passes: int) -> None:
    replicas.second.loop._admission._max_waiting = 0  # new requests are refused
    (found,) = await disturbed(replicas, [request(3)], num_passes)
    replicas.second.loop._admission._max_waiting = 9
    assert tokens(found) == tokens((await undisturbed(replicas, [request(3)]))[0])
    await replicas.client.close()


@pytest.mark.parametrize("num_passes", [0, 4])
async def test_a_target_that_leaves_continues_what_another_has_lost(replicas: Replicas, num_passes: int) -> None:
    replicas.second.loop.drain()
    (found,) = await disturbed(replicas, [request(3)], num_passes)
    replicas.second.loop.drain(False)
    assert tokens(found) == tokens((await undisturbed(replicas, [request(3)]))[0])
    await replicas.client.close()


async def test_a_full_link_takes_resumed_requests_later(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    send, num_full = MemoryLink.send, 3

    def full_at_first(link: MemoryLink, message: Message) -> None:
        nonlocal num_full
        if isinstance(message, SubmitRound) and any(one.output_token_ids for one in message.submits) and num_full:
            num_full -= 1
            raise LinkFull("it is full")
        send(link, message)

    monkeypatch.setattr(MemoryLink, "send", full_at_first)
    found = await disturbed(replicas, [request(i) for i in range(4)], 4)
    assert not num_full
    plain = await undisturbed(replicas, [request(i) for i in range(4)])
    assert [tokens(commits) for commits in found] == [tokens(commits) for commits in plain]
    await replicas.client.close()


async def test_without_another_target_the_stream_ends_with_a_clear_error(replicas: Replicas) -> None:
    replicas.engine.num_left = 3
    waiting = asyncio.create_task(answer(replicas.client.generate(request(1))))
    assert await asyncio.to_thread(replicas.engine.halted.wait, WAIT_S)
    replicas.first.hang_up()
    with pytest.raises(LinkClosed, match="again"):
        await asyncio.wait_for(waiting, WAIT_S)
    assert await replicas.num_resumed() == 0
    await replicas.client.close()


@patient
async def test_a_server_that_stops_ends_requests_and_resumes_none(replicas: Replicas) -> None:
    replicas.engine.num_left = 3
    waiting = asyncio.create_task(answer(replicas.client.generate(request(1))))
    assert await asyncio.to_thread(replicas.engine.halted.wait, WAIT_S)
    replicas.link_both()
    replicas.client.end_requests()
    with pytest.raises(LinkClosed, match="the server stops; send the request again"):
        await asyncio.wait_for(waiting, WAIT_S)
    with pytest.raises(LinkClosed, match="the server stops"):
        await answer(replicas.client.generate(request(2)))
    assert await replicas.num_resumed() == 0
    await replicas.client.close()


@patient
async def test_a_request_waits_for_a_target_that_comes_back(replicas: Replicas) -> None:
    replicas.engine.num_left = 3
    waiting = asyncio.create_task(answer(replicas.client.generate(request(1))))
    assert await asyncio.to_thread(replicas.engine.halted.wait, WAIT_S)
    replicas.first.hang_up()
    eventually(lambda: not replicas.client.is_linked, WAIT_S)
    await asyncio.sleep(0)
    assert not waiting.done()
    replicas.client.set_addresses([replicas.second.address])
    found = await asyncio.wait_for(waiting, WAIT_S)
    assert tokens(found) == tokens((await undisturbed(replicas, [request(1)]))[0])
    await replicas.client.close()


@pytest.mark.slow
@patient
async def test_a_stream_outlives_the_break_of_the_only_link(replicas: Replicas) -> None:
    """The target lives, and goes on where the gateway asks it again."""
    one = request(1, max_tokens=400)
    async with aclosing(replicas.client.generate(one)) as commits:
        begun = tokens([await anext(commits)])
        replicas.client.set_addresses([])
        await asyncio.to_thread(eventually, lambda: not replicas.client.is_linked, WAIT_S)
        replicas.client.set_addresses([replicas.first.address])
        rest = [commit async for commit in commits]
    assert await replicas.num_resumed() == 1
    assert begun + tokens(rest) == tokens((await undisturbed(replicas, [one]))[0])
    await replicas.client.close()


def test_by_default_a_stream_waits_until_a_broken_link_is_dialled_again() -> None:
    assert ApiConfig().resume_wait_s >= MAX_PAUSE_S


@patient
@pytest.mark.parametrize("ends", ["by its caller", "with the gateway"])
async def test_a_request_that_waits_for_a_target_can_end(replicas: Replicas, ends: str) -> None:
    replicas.engine.num_left = 3
    waiting = asyncio.create_task(answer(replicas.client.generate(request(1))))
    assert await asyncio.to_thread(replicas.engine.halted.wait, WAIT_S)
    replicas.first.hang_up()
    while not replicas.client._awaiting:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    if ends == "by its caller":
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        await replicas.client.close()
        with pytest.raises(LinkClosed, match="again"):
            await asyncio.wait_for(waiting, WAIT_S)
    assert not replicas.client._awaiting
    await replicas.client.close()


def test_a_resumed_request_has_no_objective_for_its_first_token() -> None:
    one = Resumption(replace(request(1), slo=Slo(1.0, 0.1, "chat")))
    assert one.resume().slo.ttft_s == 1.0, "it has none yet"
    one.deliver(Commit("r1", 3, (7,)))
    resumed = one.resume()
    assert (resumed.slo, resumed.output_token_ids) == (Slo(None, 0.1, "chat"), (7,))


@pytest.mark.parametrize(
    ("output", "parameters", "reason"),
    [
        ((1,) * 40, {}, "output of 40 tokens is complete"),
        ((1,) * 509, {"max_tokens": 600}, "output of 509 tokens is complete"),
        ((EOS + 1,), {}, "an output token lies outside"),
        ((1, 2), {"grammar": JSON}, "does not fit the grammar"),
    ],
)
async def test_an_output_that_cannot_be_continued_is_refused(
    replicas: Replicas, output: tuple[int, ...], parameters: dict[str, Any], reason: str
) -> None:
    (commit,) = await answer(replicas.first.client.generate(replace(request(1, **parameters), output_token_ids=output)))
    assert commit.finish is FinishReason.ERROR
    assert reason in (commit.error or "")
    await replicas.client.close()
