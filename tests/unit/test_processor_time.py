"""The plugin of ``make test-fast`` fails a run of which a test, or the whole, takes too much processor time."""

from types import SimpleNamespace

import pytest

from tests.support import processor_time

pytest_plugins = ("pytester",)

TESTS = """
import time

def test_long():
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass

def test_short(): ...
"""


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return pytester.runpytest_inprocess("-p", processor_time.__name__)


def test_what_takes_little_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "MAX_TOTAL_S", 1e9)
    done = run(pytester)
    assert done.ret == pytest.ExitCode.OK
    done.stdout.fnmatch_lines(["*processor time: * s of at most*", "*s test_*::test_long"])


def test_a_long_test_fails_the_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "MAX_TOTAL_S", 1e9)
    monkeypatch.setattr(processor_time, "MAX_TEST_S", 0.04)
    done = run(pytester)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["ERROR *::test_long takes more than 0.04 s"])
    done.stdout.no_fnmatch_line("ERROR *test_short*")


def test_many_short_tests_fail_the_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "MAX_TOTAL_S", 0.0)
    done = run(pytester)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["ERROR all tests take more than 0 s"])


def test_workers_tell_what_their_tests_took(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(workeroutput={processor_time.KEY: ({"test_a": 2.0}, 7.0)})
    measured = processor_time.ProcessorTime()
    measured.pytest_testnodedown(node)
    measured.pytest_testnodedown(object())  # of one that crashed
    assert measured.tests_s == {"test_a": 2.0}
    assert measured.total_s == 7.0
    monkeypatch.setattr(processor_time, "processor_s", lambda: pytest.fail("workers would count twice"))
    measured.pytest_sessionfinish(SimpleNamespace(config=object(), exitstatus=pytest.ExitCode.OK))  # type: ignore[arg-type]
    assert measured.total_s > 7.0
