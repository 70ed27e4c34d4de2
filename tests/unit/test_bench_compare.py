"""What `outrider bench compare` asks of each arm, and when."""

import asyncio
from dataclasses import dataclass, field

import pytest

from benchmarks.compare.systems import OUTRIDER, VLLM, Arm, RunningArm, chosen_arms
from benchmarks.compare.turns import TurnFailed, bursty_arrivals, closed_loop, open_loop
from benchmarks.load import LoadRequest, TimedAnswer


@dataclass
class Server:
    """Answers at once, and notes what it was asked."""

    asked: list[LoadRequest] = field(default_factory=list)
    error: str | None = None

    async def ask(self, ask: LoadRequest) -> TimedAnswer:
        await asyncio.sleep(0)
        self.asked.append(ask)
        return TimedAnswer(1.0, [0.5, 1.0], "text", 3, error=self.error)


ARM = Arm("plain", OUTRIDER, "bf16", False, "outrider", "off")
ASKS = [LoadRequest(f"r{i}", (1, 2), 3) for i in range(4)]


def test_the_plain_arm_asks_for_no_drafts() -> None:
    """A control of the comparison: with drafts, it would be the other arm."""
    server = Server()
    closed_loop(RunningArm(ARM, server, None), ASKS, 2)  # type: ignore[arg-type]
    open_loop(RunningArm(ARM, server, None), ASKS, [0.0] * 4)  # type: ignore[arg-type]
    assert [ask.drafting for ask in server.asked] == ["off"] * 8


def test_a_request_without_an_answer_ends_the_comparison() -> None:
    with pytest.raises(TurnFailed, match="plain: 500"):
        closed_loop(RunningArm(ARM, Server(error="500"), None), ASKS, 2)  # type: ignore[arg-type]


def test_drafting_comes_before_plain_decoding_of_the_same_server() -> None:
    """Its server learns from answers."""
    own = [arm for arm in chosen_arms(True, [VLLM]) if arm.family == OUTRIDER]
    assert [arm.speculative for arm in own] == [True, False]
    assert own[0].server == own[1].server


def test_bursts_have_the_mean_rate_that_was_asked_for() -> None:
    arrivals = bursty_arrivals(4000, 5.0, seed=1)
    assert arrivals == sorted(arrivals)
    assert 4000 / arrivals[-1] == pytest.approx(5.0, rel=0.1)
    in_burst = sum(at % 9.0 < 3.0 for at in arrivals)
    assert in_burst / 4000 == pytest.approx(0.8, abs=0.03)  # 8 times the rate for a third of the time
