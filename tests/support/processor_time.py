"""Plugin of pytest that fails a run that takes too much processor time, which other programs on the machine do not change.

``make test-fast`` loads it. All threads of the test processes count, and the children that they have waited for.
"""

import resource
import time
from collections.abc import Generator
from typing import Any

import pytest

# Two minutes of the slowest machine that CI runs on: 2 cores with AVX2.
MAX_TOTAL_S = 2 * 120.0
# A test that takes longer is marked `slow`. Without its fixtures, of which the first test would pay for all that share them.
MAX_TEST_S = 5.0
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
        elif self._complaints() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        tests_s, total_s = getattr(node, "workeroutput", {}).get(KEY, ({}, 0.0))
        self.tests_s.update(tests_s)
        self.total_s += total_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"processor time: {self.total_s:.0f} s of at most {MAX_TOTAL_S:.0f}")
        for test_s, name in self._slowest()[:NUM_SHOWN]:
            terminalreporter.line(f"{test_s:6.2f} s {name}")
        for complaint in self._complaints():
            terminalreporter.line(complaint, red=True)

    def _slowest(self) -> list[tuple[float, str]]:
        return sorted(((test_s, name) for name, test_s in self.tests_s.items()), reverse=True)

    def _complaints(self) -> list[str]:
        long = [f"ERROR {name} takes more than {MAX_TEST_S:g} s" for s, name in self._slowest() if s > MAX_TEST_S]
        if self.total_s > MAX_TOTAL_S:
            long.append(f"ERROR all tests take more than {MAX_TOTAL_S:g} s")
        return long


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())
