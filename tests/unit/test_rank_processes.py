"""The ranks of a target, as the supervisor sees them: one process."""

import asyncio

import pytest

from actors import health
from actors.processes import ProcessEnded
from actors.rank import RankProcesses
from tests.support.supervision import FAST, PretendedProcess


def made() -> tuple[RankProcesses, PretendedProcess, list[PretendedProcess]]:
    first, others = PretendedProcess("target-0", "info"), [PretendedProcess(f"target-0/{rank}", rank) for rank in (1, 2)]
    return RankProcesses(first, others), first, others


def test_all_ranks_start_at_the_address_of_the_first_which_answers_for_them() -> None:
    async def run() -> None:
        process, first, others = made()
        assert await process.call("start") == "info"
        await process.call("drain")
        assert [method for method, _ in first.calls] == ["rendezvous", "start", "drain"]
        assert [one.calls for one in others] == [[("follow", (None,))]] * 2

    asyncio.run(run())


def test_they_end_with_the_first_that_does_and_are_killed_together() -> None:
    async def run() -> None:
        process, first, others = made()
        watching = asyncio.ensure_future(health.wait_failure(process, FAST, 1))
        others[1].die("killed by the system")
        assert await watching == "rank 2: killed by the system"
        await process.kill()
        assert not any(one.alive for one in (first, *others))

    asyncio.run(run())


def test_a_rank_that_hangs_hides_no_end_of_another() -> None:
    async def run() -> None:
        process, first, others = made()
        others[0].silent = True
        asyncio.get_running_loop().call_later(0.05, first.die, "RankLost")
        patient = FAST.model_copy(update={"health_timeout_ms": 60_000})
        assert await health.wait_failure(process, patient, 1) == "rank 0: RankLost"
        process, first, others = made()
        others[0].silent = True
        assert await health.wait_failure(process, FAST, 1) == "it did not answer within 0.05 s"

    asyncio.run(run())


def test_a_rank_that_cannot_start_is_the_reason_of_the_whole() -> None:
    async def run() -> None:
        process, _, others = made()
        others[0].starts = False
        with pytest.raises(ProcessEnded, match="it would not start"):
            await process.call("start")

    asyncio.run(run())
