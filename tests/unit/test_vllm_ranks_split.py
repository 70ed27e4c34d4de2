"""How the cores of a machine are split over vLLM's ranks."""

import os

import pytest

from engine.vllm.ranks import BINDING, NOT_BOUND, binding_of, threads_of_ranks


@pytest.mark.parametrize(
    ("cores", "num_ranks", "num_threads", "expected"),
    [
        ({0: 0, 1: 1}, 2, 1, "0|1"),
        ({0: 0, 1: 1, 2: 2, 3: 3}, 2, 2, "0,1|2,3"),
        ({0: 0, 1: 0, 2: 1, 3: 1}, 2, 1, "0|2"),  # two CPUs of each core
        ({4: 2, 6: 3}, 2, 1, "4|6"),
        ({0: 0, 1: 1}, 2, 2, NOT_BOUND),
        ({0: 0, 1: 0}, 2, 1, NOT_BOUND),
    ],
)
def test_ranks_get_cores_of_their_own(cores: dict[int, int], num_ranks: int, num_threads: int, expected: str) -> None:
    assert binding_of(cores, num_ranks, num_threads) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, "0|1"), ("auto", "0|1"), ("2|3", "2|3")])
def test_a_binding_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str) -> None:
    monkeypatch.delenv(BINDING, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    if asked is not None:
        monkeypatch.setenv(BINDING, asked)
    with threads_of_ranks("0|1", 1):
        assert (os.environ[BINDING], os.environ["OMP_NUM_THREADS"]) == (expected, "1")
    assert (os.environ.get(BINDING), os.environ["OMP_NUM_THREADS"]) == (asked, "7")
