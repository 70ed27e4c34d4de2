"""Plugin of pytest that tells a run's processor time, which other programs on the machine change little, and who took it.

``make test-fast`` loads it. All threads of the test processes count, and the children that they have waited for. It fails no
run: processors differ by a factor of three."""

import resource
import time
from collections.abc import Generator
from typing import Any

import pytest

# Two minutes of 2 cores. A test among the slowest is made smaller or marked `slow` where the run takes more.
GOAL_S = 2 * 120.0
NUM_SHOWN = 20
KEY = "processor_time"  # of what a worker of pytest-xdist tells its controller


def processor_s() -> float:
    """Processor time of this process and of its children that have ended, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class ProcessorTime:
    """Measures the tests of this process. In pytest-xdist's controller it adds up what the workers measured."""

    def __init__(self) -> None:
        self.tests_s: dict[str, float] = {}
        self.total_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        start_s = processor_s()
        try:
            return (yield)
        finally:
            self.tests_s[item.nodeid] = processor_s() - start_s

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Workers are children of their controller, and have told what they took.
        self.total_s += time.process_time() if self.total_s else processor_s()
        told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if told is not None:
            told[KEY] = self.tests_s, self.total_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        tests_s, total_s = getattr(node, "workeroutput", {}).get(KEY, ({}, 0.0))
        self.tests_s.update(tests_s)
        self.total_s += total_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"processor time: {self.total_s:.0f} s, goal {GOAL_S:.0f}")
        slowest = sorted(((test_s, name) for name, test_s in self.tests_s.items()), reverse=True)
        for test_s, name in slowest[:NUM_SHOWN]:
            terminalreporter.line(f"{test_s:6.2f} s {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())
