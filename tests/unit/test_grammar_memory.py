"""Which grammars wait, for how long, and how much memory those that are compiled take."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind
from engine.grammar import compiling, waiting
from engine.grammar.compiling import CompiledGrammar, Grammars
from engine.grammar.vocabulary import GrammarVocabulary
from engine.grammar.waiting import GrammarRefusal, PendingGrammars
from tests.support.waiting import no_more_threads

A, B, C, D = (Grammar(GrammarKind.REGEX, f"{char}[a-z]{{3}}") for char in "abcd")


@pytest.fixture
def grammars(tiny_model_folder: Path) -> Grammars:
    return Grammars(GrammarVocabulary(tiny_model_folder, 257, (256,)))


class SlowGrammars(Grammars):
    """Each compile waits until it is let go."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        super().__init__(vocabulary)
        self.may_end = {grammar: threading.Event() for grammar in (A, B, C, D)}

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        assert self.may_end[grammar].wait(60)
        return super().compile(grammar)


@pytest.fixture
def slow(grammars: Grammars) -> Iterator[SlowGrammars]:
    slow = SlowGrammars(grammars.vocabulary)
    yield slow
    for event in slow.may_end.values():
        event.set()


class Waiter:
    """Pending grammars, and an event for each end of a compile."""

    def __init__(self, grammars: Grammars) -> None:
        self.ended = threading.Semaphore(0)
        self.pending = PendingGrammars(grammars, lambda: self.ended.release())

    def finished(self, now_s: float) -> dict[str, CompiledGrammar | GrammarRefusal]:
        return dict(self.pending.take_finished(now_s))

    def next_finished(self, now_s: float) -> dict[str, CompiledGrammar | GrammarRefusal]:
        assert self.ended.acquire(timeout=60)
        return self.finished(now_s)


def test_the_time_of_a_compile_counts_from_its_own_beginning(slow: SlowGrammars) -> None:
    """Also where no thread could be started before."""
    waiter = Waiter(slow)
    with no_more_threads():
        waiter.pending.start("a", A, -10.0)
        waiter.pending.start("b", B, 0.0)
    assert waiter.finished(0.0) == waiter.finished(29.0) == {}
    slow.may_end[A].set()
    assert isinstance(waiter.next_finished(29.0)["a"], CompiledGrammar)
    assert waiter.finished(58.0) == {}
    slow.may_end[B].set()
    assert isinstance(waiter.next_finished(58.5)["b"], CompiledGrammar)


def test_a_compile_that_takes_too_long_holds_up_no_other(slow: SlowGrammars) -> None:
    waiter = Waiter(slow)
    waiter.pending.start("a", A, 0.0)
    waiter.pending.start("b", B, 1.0)
    slow.may_end[B].set()
    refused = waiter.finished(waiting.COMPILE_S)
    assert list(refused) == ["a"]
    assert refused["a"] == GrammarRefusal("its grammar was not compiled within 30 seconds; try again later", is_busy=True)
    assert isinstance(waiter.next_finished(waiting.COMPILE_S)["b"], CompiledGrammar)
    assert waiter.pending.refusal(A) == refused["a"]
    slow.may_end[A].set()
    assert waiter.ended.acquire(timeout=60)
    assert waiter.pending.refusal(A) is None


def test_compiles_that_take_too_long_leave_few_threads_behind(slow: SlowGrammars) -> None:
    waiter = Waiter(slow)
    for i, grammar in enumerate((A, B, C)):
        waiter.pending.start(str(i), grammar, 0.0)
    assert list(waiter.finished(waiting.COMPILE_S)) == ["0"]
    assert list(waiter.finished(2 * waiting.COMPILE_S - 1.0)) == []
    slow.may_end[C].set()
    late = waiter.finished(2 * waiting.COMPILE_S)
    assert late["1"] == waiter.pending.refusal(B)
    assert late["2"] == GrammarRefusal("its grammar waited 60 seconds to be compiled; try again later", is_busy=True)
    waiter.pending.start("3", D, 61.0)
    assert waiter.finished(62.0) == {}
    slow.may_end[A].set()
    slow.may_end[D].set()
    assert waiter.ended.acquire(timeout=60)
    assert waiter.finished(63.0) == {}
    assert isinstance(waiter.next_finished(64.0)["3"], CompiledGrammar)


def test_a_full_queue_takes_what_needs_no_place_in_it(slow: SlowGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_QUEUED", 1)
    waiter = Waiter(slow)
    for i, grammar in enumerate((A, B, B)):
        assert waiter.pending.refusal(grammar) is None
        waiter.pending.start(str(i), grammar, 0.0)
    assert waiter.pending.refusal(B) is None
    refused = waiter.pending.refusal(C)
    assert refused is not None
    assert refused.is_busy
    waiter.pending.forget("1")
    assert waiter.pending.refusal(C) == refused
    waiter.pending.forget("2")
    assert waiter.pending.refusal(C) is None


def test_unused_grammars_make_room_and_used_ones_do_not(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    used = grammars.compile(A)
    monkeypatch.setattr(compiling, "MAX_TOTAL_BYTES", int(2.5 * used.num_bytes))
    state = used.follow(())
    grammars.compile(B)
    del used
    grammars.compile(C)
    assert [grammars.known(one) is not None for one in (A, B, C)] == [True, False, True]
    assert not grammars.is_full
    assert state.grammar is grammars.known(A)


def test_a_grammar_that_those_in_use_leave_no_memory_for_is_refused_for_now(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = grammars.compile(A)
    monkeypatch.setattr(compiling, "MAX_TOTAL_BYTES", int(1.5 * used.num_bytes))
    waiter = Waiter(grammars)
    waiter.pending.start("b", B, 0.0)
    refused = waiter.next_finished(0.0)["b"]
    assert isinstance(refused, GrammarRefusal)
    assert refused.is_busy
    assert "leave no memory" in refused.reason
    assert grammars.known(B) is None
    del used
    waiter.pending.start("b", B, 0.0)
    assert isinstance(waiter.next_finished(0.0)["b"], CompiledGrammar)


def test_a_grammar_that_is_too_large_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_BYTES", 0)
    with pytest.raises(InvalidField, match="takes 0 MiB compiled, at most 0 are possible"):
        grammars.compile(A)
