"""The plugin of ``make test-fast`` tells which tests took most processor time."""

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


def test_the_slowest_are_named_first(pytester: pytest.Pytester) -> None:
    done = run(pytester)
    assert done.ret == pytest.ExitCode.OK
    done.stdout.fnmatch_lines(["*processor time: * s, goal*", "*s test_*::test_long", "*s test_*::test_short"])


def test_workers_tell_what_their_tests_took() -> None:
    node = SimpleNamespace(workeroutput={processor_time.KEY: ({"test_a": 2.0}, 7.0)})
    measured = processor_time.ProcessorTime()
    measured.pytest_testnodedown(node)
    measured.pytest_testnodedown(object())  # of one that crashed
    assert measured.tests_s == {"test_a": 2.0}
    assert measured.total_s == 7.0
    measured.pytest_sessionfinish(SimpleNamespace(config=object(), exitstatus=pytest.ExitCode.OK))  # type: ignore[arg-type]
    assert measured.total_s > 7.0
