"""Who has the machine when, and what is measured of it."""

from typing import cast

import pytest

from benchmarks.completion import Completion
from benchmarks.interleaved import InterleavedServer, Served, Throughput, run_interleaved, throughput_of
from cluster.types import Commit


def completion(start_s: float, *lens: int) -> Completion:
    """A commit a second."""
    commits = [Commit("r", 0, (7,) * num) for num in lens]
    return Completion([], commits, [start_s + i for i in range(len(lens))])


def test_a_lap_is_measured_until_its_last_answer_ends() -> None:
    """The second takes the first's place; of the last, which is only company, counts what came until then."""
    completions = [completion(0.0, 1, 2), completion(0.5, 1, 1), completion(2.0, 1, 3, 3), completion(2.5, 1, 5, 9, 9)]
    assert throughput_of(completions, 2, 3) == Throughput(2 + 1 + (1 + 3 + 3) + (1 + 5), 4.0 - 0.5)


def test_answers_that_end_with_their_first_commit_are_not_measured() -> None:
    assert throughput_of([completion(0.0, 1), completion(0.0, 1)], 2, 2) is None
    assert throughput_of([], 2, 0) is None


class _Telling:
    """Tells so many tokens a turn; fails once it has told so many."""

    def __init__(self, a_turn: int, in_all: int, fails_at: int | None = None) -> None:
        self._a_turn, self._in_all, self._fails_at = a_turn, in_all, fails_at
        self.num_tokens_done = 0
        self.has_given_up = False

    @property
    def has_ended(self) -> bool:
        return self.num_tokens_done >= self._in_all

    def take_turn(self) -> None:
        self.num_tokens_done += self._a_turn
        if self._fails_at is not None and self.num_tokens_done >= self._fails_at:
            raise RuntimeError("failed")

    def abort(self) -> None:
        self.has_given_up = True


def test_who_has_told_fewest_tokens_is_next() -> None:
    apart: list[int] = []

    class _Watched(_Telling):
        def take_turn(self) -> None:
            super().take_turn()
            apart.append(abs(slow.num_tokens_done - fast.num_tokens_done))

    slow, fast = _Watched(10, 1000), _Watched(25, 1000)
    run_interleaved([slow, fast])
    assert slow.has_ended
    assert fast.has_ended
    assert max(apart) <= 25
    assert not slow.has_given_up


def test_when_one_fails_all_give_up() -> None:
    sound, failing = _Telling(10, 1000), _Telling(10, 1000, fails_at=500)
    with pytest.raises(RuntimeError, match="failed"):
        run_interleaved([sound, failing])
    assert sound.has_given_up
    assert failing.has_given_up
    assert sound.num_tokens_done <= 510


def test_a_run_needs_as_many_requests_as_it_measures() -> None:
    """It would wait for their answers for ever."""
    served = cast(Served, None)
    for num_measured in (-1, 1):
        with pytest.raises(ValueError, match=rf"{num_measured} requests are to be measured, and there are 0"):
            InterleavedServer(served, [], num_measured, lambda _: None)
