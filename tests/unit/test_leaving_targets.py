"""Gateways send new requests to targets that leave only where there are no others, and to those with their prefix."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from actors.gateway import LinkClient
from cluster.client import ClusterStatus
from cluster.messages import Hello, Role, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Mailbox, Received
from cluster.transport.factory import listen
from cluster.types import Request
from router.target_choice import BLOCK_LEN, TargetChoice
from tests.support.supervision import eventually
from tests.support.toys import MODEL, VOCAB_SIZE


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
