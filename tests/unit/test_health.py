"""Health checks of the supervisor on one process."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from actors import health
from actors.processes import ProcessEnded, RestartPolicy
from actors.target import RankProcesses
from cluster.config import SupervisionConfig
from tests.support.supervision import FAST, PretendedProcess

TIMEOUT_S = FAST.health_timeout_ms / 1e3
# Where only the clock is moved, nothing waits so long, and a busy machine's own pauses are short beside it.
PATIENT = FAST.model_copy(update={"health_timeout_ms": 5000})
PATIENT_S = PATIENT.health_timeout_ms / 1e3


class PausableLoop(asyncio.SelectorEventLoop):
    """While the machine is paused, its clock goes on and nothing runs."""

    paused_s = 0.0

    def time(self) -> float:
        return super().time() + self.paused_s


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=PausableLoop) as runner:
        runner.run(test)


def pause(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PausableLoop)
    loop.paused_s += seconds


class PausedWith(PretendedProcess):
    """The first check finds it, and the supervisor, stopped for ten minutes; later ones find it running."""

    num_checks = 0

    async def stalled_s(self) -> float:
        self.num_checks += 1
        if self.num_checks == 1:
            pause(600.0)
            return 600.0
        return await super().stalled_s()


def test_a_check_during_which_the_supervisor_was_stopped_decides_nothing() -> None:
    async def check() -> None:
        process = PausedWith("drafter-0", "info")
        watching = asyncio.ensure_future(health.wait_failure(process, FAST, 1))
        while process.num_checks < 3:
            assert not watching.done(), watching.result()
            await asyncio.sleep(TIMEOUT_S / 6)
        process.unread = 60.0
        assert await watching == "its loop has been stalled for 60.0 s"

    run(check())


class StarvedWith(PretendedProcess):
    """It answers after a time in which the machine serves neither it nor the supervisor, but for moments."""

    num_answers = 0
    num_well = 0  # of the next answers: its loop is not stalled

    async def stalled_s(self) -> float:
        for _ in range(4):
            pause(0.4 * PATIENT_S)
            await asyncio.sleep(0)
        self.num_answers += 1
        if self.num_well:
            self.num_well -= 1
            return 0.0
        return 1.4 * PATIENT_S


def test_time_in_which_the_supervisor_is_starved_does_not_count() -> None:
    """The process is silent and stalled for longer than it may be, in wall time."""

    async def check() -> None:
        process = StarvedWith("router", "info")
        watching = asyncio.ensure_future(health.wait_failure(process, PATIENT, 1))
        for num_checks in (2, 5, 8):
            while process.num_answers < num_checks:
                assert not watching.done(), watching.result()
                await asyncio.sleep(0)
            process.num_well = 1
        process.silent = True
        process.die("killed")
        assert await watching == "killed"

    run(check())


def test_a_process_that_is_never_well_is_replaced_however_starved_the_supervisor_is() -> None:
    async def check() -> None:
        process = StarvedWith("router", "info")
        watching = asyncio.ensure_future(health.wait_failure(process, PATIENT, 1))
        while not watching.done():
            assert process.num_answers < 5
            await asyncio.sleep(0)
        reasons = ("its loop has been stalled for 7.0 s", "it did not answer within 5 s")
        assert watching.result() in reasons, "the later, as the wait is no longer lengthened"

    run(check())


@pytest.fixture
def fine_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SLICE_S", 0.1 * TIMEOUT_S)


@pytest.mark.usefixtures("fine_slices")
@pytest.mark.parametrize("pause_s", [0.0, 600.0])
def test_short_pauses_of_the_supervisor_lengthen_the_wait_for_an_answer_by_a_few_timeouts(pause_s: float) -> None:
    """One long pause among them is left out."""

    async def check() -> None:
        process = PretendedProcess("router", "info", silent=True)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        watching = asyncio.ensure_future(health.wait_failure(process, FAST, 1))
        await asyncio.sleep(0.05 * TIMEOUT_S)
        pause(pause_s)
        while not watching.done():
            await asyncio.sleep(0.05 * TIMEOUT_S)
            pause(0.8 * TIMEOUT_S)
        assert watching.result() == "it did not answer within 0.05 s"
        assert 3 * TIMEOUT_S < clock() - began_s - pause_s < 7 * TIMEOUT_S

    run(check())


def test_a_process_that_alone_is_silent_is_replaced() -> None:
    async def check() -> None:
        process = PretendedProcess("router", "info", silent=True)
        assert await health.wait_failure(process, FAST, 2) == "it did not answer within 0.1 s"

    run(check())


def test_a_supervisor_that_is_cut_off_replaces_nobody_for_silence() -> None:
    """Nor soon after it, once the head is back; a process that ends meanwhile is told from a silent one."""

    async def check() -> None:
        process, answers = PretendedProcess("router", "info", silent=True), [True, True, False]

        async def is_cut_off() -> bool:
            if answers:
                return answers.pop(0)
            process.die("it ended")
            await asyncio.sleep(0.0)
            return False

        assert await health.wait_failure(process, FAST, 1, is_cut_off) == "it ended"
        process = PretendedProcess("router", "info", silent=True)
        answers = [True, False, False, False, False, False]
        assert "did not answer" in await health.wait_failure(process, FAST, 1, is_cut_off)
        assert 0 < len(answers) < 4, "spared once at least"

    run(check())


# ---- when a process that ended is started again


CONFIG = SupervisionConfig(quarantine_restarts=4)


def pauses_s(policy: RestartPolicy, times_s: list[float]) -> list[float]:
    return [policy.failed(now_s).at_s - now_s for now_s in times_s]


def test_first_restart_comes_at_once_and_further_ones_after_doubled_pauses() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=False)
    assert pauses_s(policy, [0, 1, 2, 3, 4, 5, 6]) == pytest.approx([0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0])
    assert policy.num_restarts == 7


def test_thousands_of_failures_stay_at_the_longest_pause() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=False)
    assert pauses_s(policy, [i / 1000 for i in range(5000)])[-1] == pytest.approx(5.0)


def test_a_drafter_that_fails_too_often_within_the_window_is_quarantined_and_then_starts_afresh() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=True)
    outcomes = [policy.failed(now_s) for now_s in (0, 1, 2, 3)]
    assert [outcome.quarantined for outcome in outcomes] == [False, False, False, True]
    assert outcomes[-1].at_s == 3 + 120
    again = policy.failed(123)
    assert (again.quarantined, again.at_s) == (False, 123)


def test_failures_that_are_far_apart_count_as_first_ones() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=True)
    outcomes = [policy.failed(i * 61.0) for i in range(20)]
    assert not any(outcome.quarantined for outcome in outcomes)
    assert all(outcome.at_s == i * 61.0 for i, outcome in enumerate(outcomes))


def test_what_the_service_needs_is_never_quarantined() -> None:
    policy = RestartPolicy(CONFIG, may_quarantine=False)
    assert not any(policy.failed(now_s).quarantined for now_s in range(50))


# ---- the ranks of a target, as the supervisor sees them: one process


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
