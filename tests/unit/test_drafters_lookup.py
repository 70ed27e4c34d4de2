"""Drafters without a model: what they find, what they forget, and that they need no torch."""

import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import SuffixOptions
from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.native.lookup import MAX_MATCH_LEN
from drafters.ngram import HitRate, NgramDrafter
from drafters.protocol import Demand, Draft, Drafter
from tests.reference.suffix import SuffixDrafter
from tests.reference.suffix_automaton import ROOT, SuffixAutomaton

SAMPLING = SamplingParams(max_tokens=1000)
texts = st.lists(st.integers(0, 3), max_size=30)


def follow(drafter: Drafter, token_ids: Sequence[int], prompt_len: int = 0, name: str = "a") -> None:
    drafter.open(name, token_ids, prompt_len, SAMPLING)


def answer(drafter: Drafter, token_ids: Sequence[int], prompt: Sequence[int] = (1000,), name: str = "other") -> None:
    follow(drafter, prompt, len(prompt), name)
    drafter.extend(name, token_ids)


def suffix(**arguments: Any) -> SuffixDrafter:
    """As configured, but for the arguments."""
    preset = {"max_match_len": MAX_MATCH_LEN, "max_shared_tokens": SuffixOptions().max_shared_tokens}
    return SuffixDrafter(**{**preset, **arguments})


def draft(drafter: Drafter, num_tokens: int, ahead: Sequence[int] = (), name: str = "a") -> Draft:
    (result,) = drafter.propose([Demand(name, num_tokens, tuple(ahead))])
    drafter.check_integrity()
    return result


class TestNgram:
    @given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
    def test_copies_what_followed_the_last_occurrence_of_the_longest_match(
        self, text: list[int], min_len: int, more: int, num_tokens: int
    ) -> None:
        drafter = NgramDrafter(min_len + more, min_len)
        follow(drafter, text[: len(text) // 2])
        drafter.extend("a", text[len(text) // 2 :])
        assert list(draft(drafter, num_tokens).token_ids) == self._slowly(text, min_len, min_len + more, num_tokens)

    @staticmethod
    def _slowly(text: list[int], min_len: int, max_len: int, num_tokens: int) -> list[int]:
        for n in range(max_len, min_len - 1, -1):
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == text[-n:]:
                    copied = list(text)
                    for i in range(num_tokens):
                        copied.append(copied[start + n + i])
                    return copied[len(text) :]
        return []

    def test_goes_on_behind_what_was_drafted(self) -> None:
        drafter = NgramDrafter()
        follow(drafter, [*range(20), 5, 6])
        assert draft(drafter, 2).token_ids == (7, 8)
        assert draft(drafter, 3, (7, 8)).token_ids == (9, 10, 11)
        assert draft(drafter, 3, (50, 51)).token_ids == ()

    def test_confidence_follows_what_became_of_the_guesses(self) -> None:
        drafter = NgramDrafter(max_match_len=2, min_match_len=2)
        follow(drafter, [1, 2, 3, 4, 1, 2])
        before = draft(drafter, 3).confidences
        for _ in range(30):  # always right at the first place, then always wrong
            drafter.extend("a", [3, 9, 1, 2])
            follow(drafter, [1, 2, 3, 4, 1, 2])
            draft(drafter, 3)
        after = draft(drafter, 3).confidences
        assert after[0] > before[0]
        assert after[0] > 0.75
        assert after[1] < before[1]
        assert after[1] < 0.25
        assert after[2] == before[2], "behind a wrong guess nothing is learned"

    def test_each_guess_is_one_trial_however_often_it_was_proposed(self) -> None:
        once, often = NgramDrafter(2, 2), NgramDrafter(2, 2)
        for drafter, times in ((once, 1), (often, 5)):
            follow(drafter, [1, 2, 3, 4, 1, 2])
            for _ in range(times):
                draft(drafter, 2)
                draft(drafter, 2, (3, 4))
            drafter.extend("a", [3, 4, 1])
        assert draft(once, 3).confidences == draft(often, 3).confidences


def test_a_hit_rate_remembers_and_forgets() -> None:
    rate = HitRate(0.5)
    for _ in range(2000):
        rate.record(True)
    assert rate.value > 0.99
    for _ in range(1000):
        rate.record(False)
    assert rate.value < 0.2


class TestSuffixAutomaton:
    @given(st.lists(texts, min_size=1, max_size=4))
    def test_holds_every_substring_and_how_often_it_occurred(self, several: list[list[int]]) -> None:
        automaton = SuffixAutomaton()
        expected: Counter[tuple[int, ...]] = Counter()
        for text in several:
            automaton.begin()
            automaton.extend(text)
            expected.update(tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1))
        automaton.check_integrity()
        for substring, count in expected.items():
            state: int | None = ROOT
            for token_id in substring:
                assert state is not None
                state = automaton.step(state, token_id)
            assert state is not None
            assert automaton.count(state) == count
            followers = {token_id: automaton.count(follower) for token_id, follower in automaton.followers(state)}
            assert followers == {t: expected[(*substring, t)] for t in range(4) if expected[(*substring, t)]}
            token_id, follower, most, total = automaton.likeliest(state)
            assert (most, total) == (max(followers.values(), default=0), sum(followers.values()))
            assert not total or (automaton.step(state, token_id), automaton.count(follower)) == (follower, most)

    @given(texts, texts)
    def test_walks_to_the_longest_end_that_occurs(self, text: list[int], walked: list[int]) -> None:
        automaton = SuffixAutomaton()
        automaton.extend(text)
        occurring = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)} | {()}
        longest = max(n for n in range(len(walked) + 1) if tuple(walked[len(walked) - n :]) in occurring)
        state, match_len = automaton.walk(ROOT, 0, walked)
        assert match_len == longest
        assert automaton.walk(ROOT, 0, walked[len(walked) - longest :]) == (state, longest)

    @given(texts.filter(bool))
    def test_the_link_of_the_whole_text_is_its_longest_end_that_occurred_before(self, text: list[int]) -> None:
        automaton = SuffixAutomaton()
        automaton.extend(text)
        state = automaton.suffix(automaton.last)
        assert state is not None
        ends = (n for n in range(len(text)) if any(text[i : i + n] == text[len(text) - n :] for i in range(len(text) - n)))
        assert automaton.substring_len(state) == max(ends)

    @pytest.mark.parametrize("vocab_size", [1, 2, 5, 300, 49152])
    def test_takes_no_more_memory_than_promised(self, vocab_size: int) -> None:
        rng = random.Random(vocab_size)
        text = [rng.randrange(vocab_size) for _ in range(5_000)]
        tracemalloc.start()
        try:
            automaton = SuffixAutomaton()
            automaton.extend(text)
            num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert num_bytes <= 450 * len(text)


class TestSuffix:
    def test_follows_the_most_frequent_continuation(self) -> None:
        drafter = suffix(min_survival=0.0)
        follow(drafter, [1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 4, 9, 1, 2])
        assert draft(drafter, 1).token_ids == (4,)
        (certain,) = draft(drafter, 1).confidences
        follow(drafter, [1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 5, 9, 1, 2])
        (uncertain,) = draft(drafter, 1).confidences
        assert uncertain < certain

    def test_a_longer_match_makes_it_more_confident(self) -> None:
        drafter = suffix()
        confidences = []
        for length in (2, 4, 8, 16):
            follow(drafter, [*range(50), *range(20, 20 + length)])
            confidences.append(draft(drafter, 1).confidences[0])
        assert confidences == sorted(confidences)
        assert len(set(confidences)) == 4

    def test_stops_where_the_draft_would_likely_be_wrong(self) -> None:
        rng = random.Random(0)
        text = [token for _ in range(60) for token in (1, 2, rng.randrange(10, 90))] + [1, 2]
        bold, careful = suffix(min_survival=0.0), suffix(min_survival=0.3)
        for drafter in (bold, careful):
            follow(drafter, text)
        assert len(draft(bold, 5).token_ids) == 5
        assert draft(careful, 5).token_ids == ()
        for drafter in (bold, careful):
            follow(drafter, [1, 2, 3, 4] * 30)
        assert draft(careful, 20).token_ids == draft(bold, 20).token_ids == (1, 2, 3, 4) * 5

    def test_goes_on_behind_what_was_drafted(self) -> None:
        drafter = suffix()
        follow(drafter, [*range(30), 5, 6, 7])
        assert draft(drafter, 2).token_ids == (8, 9)
        assert draft(drafter, 2, (8, 9)).token_ids == (10, 11)
        assert draft(drafter, 2, (80, 81)).token_ids == ()

    def test_learns_from_what_others_were_answered_but_not_from_what_they_asked(self) -> None:
        drafter = suffix()
        answer(drafter, range(10, 30), prompt=[90, 91, 92])
        follow(drafter, [50, 51, 12, 13, 14])
        assert draft(drafter, 3).token_ids == ()
        drafter.release("other")
        assert draft(drafter, 3).token_ids == (15, 16, 17)
        follow(drafter, [50, 90, 91], name="b")
        assert draft(drafter, 3, name="b").token_ids == ()

    def test_remembers_nothing_of_others_where_it_may_not(self) -> None:
        drafter = suffix(max_shared_tokens=0)
        answer(drafter, range(10, 30))
        drafter.release("other")
        follow(drafter, [50, 51, 12, 13, 14])
        assert draft(drafter, 3).token_ids == ()

    def test_a_request_that_comes_and_goes_is_remembered_once(self) -> None:
        drafter = suffix(max_shared_tokens=400)
        answer(drafter, range(200, 250))
        drafter.release("other")
        text = [7]
        for start in range(0, 100, 5):  # handed to another drafter and back, twenty times
            follow(drafter, text, 1, "moving")
            drafter.extend("moving", range(start, start + 5))
            text += range(start, start + 5)
            drafter.release("moving")
        follow(drafter, [50, 210, 211, 212])
        assert draft(drafter, 2).token_ids == (213, 214), "what others were answered was not pushed out"
        follow(drafter, [90, 31, 32])
        (repeated,) = draft(drafter, 1).confidences
        once = suffix(max_shared_tokens=400)
        answer(once, range(30, 35))
        once.release("other")
        follow(once, [90, 31, 32])
        assert draft(once, 1).confidences == (repeated,), "it counts as said once"

    def test_forgets_the_oldest_answers_first(self) -> None:
        drafter = suffix(max_shared_tokens=400)
        for i in range(20):  # of 50 tokens each, and 100 fit into a quarter of the memory
            answer(drafter, range(100 * i, 100 * i + 50))
            drafter.release("other")

        def remembers(i: int) -> bool:
            follow(drafter, range(100 * i + 10, 100 * i + 14))
            return bool(draft(drafter, 1).token_ids)

        remembered = [remembers(i) for i in range(20)]
        assert remembered == sorted(remembered)
        assert 6 <= sum(remembered) <= 8

    def test_a_request_that_outgrows_its_memory_keeps_its_latest_half(self) -> None:
        drafter = suffix(request_tokens=100)
        follow(drafter, range(1000))
        for start in range(1000, 1500, 7):
            drafter.extend("a", range(start, start + 7))
            drafter.check_integrity()
        drafter.extend("a", range(1460, 1470))
        assert draft(drafter, 2).token_ids == (1470, 1471)
        drafter.extend("a", range(10, 20))
        assert draft(drafter, 2).token_ids == ()


@pytest.mark.parametrize("make", [NgramDrafter, suffix])
def test_where_rows_cost_a_draft_ends_where_it_is_not_worth_them(make: Callable[[], Drafter]) -> None:
    drafter = make()
    follow(drafter, [*range(10), *range(5)] * 2)
    free = draft(drafter, 8)
    survival = list(accumulate(free.confidences, mul))
    assert len(free.token_ids) == 8
    for price, num_tokens in ((2 * survival[4], 5), (2.0, 1)):
        (dear,) = drafter.propose([Demand("a", 8, terms=DraftTerms(row_price=price))])
        assert dear.token_ids == free.token_ids[:num_tokens], "as far as half of its price, and at least one"
        assert dear.confidences == free.confidences[:num_tokens]


def test_lookups_need_neither_torch_nor_numpy() -> None:
    """They run in small processes."""
    program = (
        "import sys\n"
        "from cluster.config import DrafterConfig, NgramOptions, SuffixOptions\n"
        "from cluster.types import ModelInfo\n"
        "import drafters.loop\n"
        "from drafters.registry import make_drafter\n"
        "for options in (NgramOptions(), SuffixOptions()):\n"
        "    make_drafter(DrafterConfig(name='d', options=options), ModelInfo('m', 9, 9, (1,), 'f'))\n"
        "sys.exit(', '.join(sorted({'torch', 'numpy', 'ray', 'transformers'} & sys.modules.keys())) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_they_run_in_python_and_the_log_says_so(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    if compiler == "no-such-compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    program = (
        "from drafters.native.lookup import compiled\n"
        "from drafters.ngram import HitRate, NgramDrafter\n"
        "from cluster.config import DrafterConfig, SuffixOptions, TableOptions\n"
        "from drafters.registry import make_drafter\n"
        "from tests.support.toys import MODEL\n"
        "made = [make_drafter(DrafterConfig(name='d', options=one), MODEL) for one in (SuffixOptions(), TableOptions())]\n"
        "print([type(drafter).__name__ for drafter in [compiled(NgramDrafter()), *made]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['NgramDrafter', 'NgramDrafter', 'NgramDrafter']", done.stderr
    assert done.stderr.count("ngram drafts for suffix and table") == 1
