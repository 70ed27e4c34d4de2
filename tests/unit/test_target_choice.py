"""Which target serves a request, by what targets have cached and by their load."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from actors.gateway import LinkClient
from benchmarks.embedded import EmbeddedCluster
from cluster.client import ClusterStatus
from cluster.messages import Hello, Role, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport import listen
from cluster.transport.base import Mailbox, Received
from cluster.types import Adapter, Request
from router.cost_model import TableCost
from router.target_choice import BLOCK_LEN, MAX_BLOCKS, TargetChoice
from tests.support.supervision import eventually
from tests.support.toys import MODEL, VOCAB_SIZE, ToyTarget

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def request(*parts: int, salt: str = "") -> Request:
    """Its prompt has a block for each of ``parts``, and a further token."""
    tokens = [token for part in parts for token in [part] * BLOCK_LEN]
    return Request("r", (*tokens, 0), GREEDY, 0.0, cache_salt=salt)


def served(choice: TargetChoice[str], target: str, *parts: int, num_cached: int = 0, salt: str = "") -> None:
    blocks = choice.blocks(request(*parts, salt=salt))
    choice.computed(target, blocks, BLOCK_LEN * num_cached, choice.num_known(target, blocks))
    choice.ended(target, BLOCK_LEN * (len(parts) - num_cached))


def chosen(choice: TargetChoice[str], *parts: int, a: int = 0, b: int = 0, salt: str = "") -> str:
    """With so many requests at targets "a" and "b"."""
    return choice.ranked({"a": a, "b": b}, choice.blocks(request(*parts, salt=salt)))[0]


def test_a_prompt_goes_where_its_prefix_is() -> None:
    choice: TargetChoice[str] = TargetChoice()
    served(choice, "a", 1, 2, 3, 4)
    served(choice, "b", 5, 6, 7, 8)
    assert chosen(choice, 1, 2, 3, 4, 9) == "a"
    assert chosen(choice, 5, 6, 7, 8, 9) == "b"
    assert chosen(choice, 5, 6, 9, 9, b=1) == "b"
    assert chosen(choice, 5, 6, 9, 9, b=3) == "a"  # half of a prompt is worth less than a place behind three requests
    without: TargetChoice[str] = TargetChoice(by_prefix=False)
    served(without, "a", 1, 2, 3, 4)
    assert chosen(without, 1, 2, 3, 4, 9) == "b"


def test_prefixes_of_other_salts_and_adapters_do_not_count() -> None:
    choice: TargetChoice[str] = TargetChoice()
    served(choice, "a", 1, 2, 3, 4, salt="one")
    assert chosen(choice, 1, 2, 3, 4, salt="one") == "a"
    assert chosen(choice, 1, 2, 3, 4, salt="two") == "b"
    with_adapter = replace(request(1, 2, 3, 4, salt="one"), adapter=Adapter("x", "/x", "key"))
    assert choice.ranked({"a": 0, "b": 0}, choice.blocks(with_adapter))[0] == "b"
    scored = replace(request(1, 2, 3, 4, salt="one"), sampling=replace(GREEDY, prompt_logprobs=0))
    assert not choice.blocks(scored)  # its prompt is computed whole


def test_a_target_with_many_requests_gets_no_more() -> None:
    choice: TargetChoice[str] = TargetChoice()
    served(choice, "a", *range(400))
    served(choice, "b", 1000)
    for _ in range(2000):
        choice.ended("a", 1)
        choice.ended("b", 1)
    assert chosen(choice, *range(400), a=2) == "a"
    assert chosen(choice, *range(400), a=8) == "b"


def test_an_eviction_is_learned_from_the_next_answer() -> None:
    choice: TargetChoice[str] = TargetChoice()
    for first in (10, 20, 30):
        served(choice, "a", *range(first, first + 8))
        served(choice, "b", first + 1000)
    served(choice, "a", *range(20, 28), 29)  # none of its blocks was there, so those used before are not there either
    served(choice, "b", 2000)
    assert chosen(choice, *range(10, 18)) == "b"
    assert chosen(choice, *range(20, 28)) == "a"
    assert chosen(choice, *range(30, 38)) == "a"


def test_gateways_learn_from_each_other() -> None:
    one: TargetChoice[str] = TargetChoice()
    other: TargetChoice[str] = TargetChoice()
    served(one, "a", 1, 2, 3, 4)
    served(one, "b", 5, 6, 7, 8)
    assert chosen(other, 5, 6, 7, 8) == "a"
    for _ in range(2):  # the first exchange is missed
        told = one.recent()
    for target in "ab":
        for blocks in [blocks for where, blocks in told if where == target]:
            other.learn(target, blocks)
    assert not one.recent()
    assert chosen(other, 5, 6, 7, 8) == "b"
    assert chosen(other, 1, 2, 3, 4) == "a"


def test_a_gateway_that_joins_learns_whole_prompts_of_conversations_that_go_on() -> None:
    one: TargetChoice[str] = TargetChoice()
    served(one, "b", 5, 6)
    for _ in range(2):
        one.recent()
    served(one, "b", 5, 6, 7, num_cached=2)
    joined: TargetChoice[str] = TargetChoice()
    for target, blocks in one.recent():
        joined.learn(target, blocks)
    assert chosen(joined, 5, 6, 7, 8) == "b"


def test_twins_that_are_computed_together_are_no_sign_of_an_eviction() -> None:
    choice: TargetChoice[str] = TargetChoice()
    served(choice, "b", 1, 2, 3, 4)
    twin = choice.blocks(request(*range(10, 16)))
    for _ in range(2):
        choice.computed("b", twin, 0, num_known=0)
    assert chosen(choice, 1, 2, 3, 4) == "b"


def test_a_target_that_restarts_has_nothing_cached() -> None:
    choice: TargetChoice[str] = TargetChoice()
    served(choice, "a", 1, 2, 3, 4)
    served(choice, "b", 9)
    assert chosen(choice, 1, 2, 3, 4, a=1) == "a"
    choice.forget("a")
    assert chosen(choice, 1, 2, 3, 4, a=1) == "b"


def test_what_is_known_of_a_target_is_bounded() -> None:
    choice: TargetChoice[str] = TargetChoice()
    for first in range(0, MAX_BLOCKS + 4096, 1024):
        choice.computed("a", choice.blocks(request(*range(first, first + 1024))), 0, 0)
    assert chosen(choice, *range(MAX_BLOCKS, MAX_BLOCKS + 1024), a=1) == "a"
    assert chosen(choice, *range(4096, 4096 + 1024), a=1) == "a"
    assert chosen(choice, *range(3072, 3072 + 1024), a=1) == "b"


@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize("by_prefix", [False, True])
def test_load_is_balanced(num_shared: int, by_prefix: bool) -> None:
    """Although targets are always idle, a prefix that all share must not draw all requests to one."""
    choice: TargetChoice[str] = TargetChoice(by_prefix)
    rng, counts, caches = random.Random(0), Counter[str](), {"a": set[int](), "b": set[int]()}
    for number in range(400):
        parts = (*range(num_shared), *(rng.randrange(10**9) for _ in range(rng.randrange(4, 12))))
        target = chosen(choice, *parts)
        num_cached = num_shared if number and 0 in caches[target] else 0
        caches[target].add(0)
        served(choice, target, *parts, num_cached=num_cached)
        counts[target] += len(parts) - num_cached
    assert max(counts.values()) <= 1.1 * counts.total() / 2


def test_without_shared_prefixes_the_fewest_requests_decide() -> None:
    choice: TargetChoice[str] = TargetChoice()
    served(choice, "a", *range(50))
    assert chosen(choice, 100, 101, a=0, b=1) == "a"
    assert chosen(choice, 100, 101, a=1, b=1) == "b"


def test_conversations_stay_at_their_targets_in_balance() -> None:
    """40 conversations of eight turns, in any order, four under way at a time."""
    choice: TargetChoice[str] = TargetChoice()
    rng, work = random.Random(1), Counter[str]()
    turns = [turn for _ in range(8) for turn in rng.sample(range(40), 40)]
    num_before, cached, under_way = Counter[int](), Counter[tuple[str, int]](), ["a", "b", "a", "b"]
    num_cached = 0
    for one in turns:
        num_before[one] += 1
        parts = tuple(1000 * one + i for i in range(10 * num_before[one]))
        open_at = Counter(under_way[-4:])
        target = chosen(choice, *parts, a=open_at["a"], b=open_at["b"])
        under_way.append(target)
        served(choice, target, *parts, num_cached=cached[target, one])
        work[target] += len(parts) - cached[target, one]
        num_cached += cached[target, one]
        cached[target, one] = len(parts)
    assert num_cached >= 0.9 * 40 * sum(range(0, 80, 10))  # of all that earlier turns computed
    assert max(work.values()) <= 1.2 * work.total() / 2


@pytest.mark.parametrize("by_prefix", [True, False])
def test_a_gateway_continues_conversations_where_they_are_cached(by_prefix: bool) -> None:
    """Three conversations of two turns, one call at a time: by load alone each second turn goes to the other target."""
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(1, MODEL.vocab_size), k=BLOCK_LEN + 4)) for _ in range(3)]

    async def ask(client: LinkClient) -> None:
        for number, prompt in enumerate([*prompts, *((*prompt, 1, 2) for prompt in prompts)]):
            async for _ in client.generate(Request(f"r{number}", prompt, replace(GREEDY, max_tokens=1), 0.0)):
                pass
        await client.close()

    targets = [EmbeddedCluster(ToyTarget(num_blocks=128), MODEL, TableCost((1, 32), (0.02, 0.03)), {}) for _ in range(2)]
    with targets[0], targets[1]:
        addresses = [target.address for target in targets]
        client = LinkClient("both", MODEL, addresses, targets[0].client.status, by_prefix=by_prefix)
        assert client.wait_linked(10.0, num_targets=2)
        asyncio.run(ask(client))
        cached = [target.loop.telemetry.num_cached_tokens for target in targets]
        assert len(client.recent_prefixes()[""]) == (3 if by_prefix else 0)  # embedded targets have no instances
    assert sum(cached) == (3 * (BLOCK_LEN + 4) if by_prefix else 0)
    assert not by_prefix or all(cached)


# ---- gateways send new requests to targets that leave only where there are no others, and to those with their prefix


class Target:
    """Counts the requests that it gets, and answers none."""

    def __init__(self, number: int) -> None:
        self.name, self.address, self._num = f"target-{number}", f"memory://leaving-{number}", 0
        self._mailbox = Mailbox()
        self._listener = listen(
            self.address, self._mailbox, Hello(Role.TARGET, self.name, VOCAB_SIZE, "toy", instance=self.name)
        )

    def num_submitted(self) -> int:
        for event in self._mailbox.drain():
            if isinstance(event, Received) and isinstance(event.message, SubmitRound):
                self._num += len(event.message.submits)
        return self._num

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
async def targets() -> AsyncIterator[list[Target]]:
    targets = [Target(1), Target(2)]
    yield targets
    for target in targets:
        target.close()


async def _no_status() -> ClusterStatus:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize(("leaving", "expected"), [((1,), (0, 4)), ((2,), (4, 0)), ((1, 2), (2, 2))])
async def test_new_requests_avoid_targets_that_leave(
    targets: list[Target], leaving: tuple[int, ...], expected: tuple[int, int]
) -> None:
    client = LinkClient("test", MODEL, [target.address for target in targets], _no_status)
    assert await asyncio.to_thread(client.wait_linked, 10.0, 2)
    client.set_leaving([f"target-{number}" for number in leaving])
    await submitted_to(targets, client, (1, 2), expected)


async def test_a_prefix_that_another_gateway_knows_decides(targets: list[Target]) -> None:
    client = LinkClient("test", MODEL, [target.address for target in targets], _no_status)
    assert await asyncio.to_thread(client.wait_linked, 10.0, 2)
    prompt = (1,) * (BLOCK_LEN + 1)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    client.learn_prefixes({"target-2": [TargetChoice().blocks(Request("r", prompt, sampling, 0.0))], "gone": [(1,)]})
    await submitted_to(targets, client, prompt, (0, 4))


async def submitted_to(
    targets: list[Target], client: LinkClient, prompt: tuple[int, ...], expected: tuple[int, int]
) -> None:
    """Of four requests that come at once."""

    async def ask(number: int) -> None:
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        async for _ in client.generate(Request(f"r{number}", prompt, sampling, time.monotonic())):
            pass

    asking = [asyncio.create_task(ask(number)) for number in range(4)]
    await eventually(lambda: sum(target.num_submitted() for target in targets) == 4)
    assert tuple(target.num_submitted() for target in targets) == expected
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await client.close()
