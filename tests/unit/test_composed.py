"""Prompts composed from prompts at hand, and the turns that all sources of prompts take."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from drafters.training.composed import compose
from drafters.training.corpus import MAX_PROMPT_CHARS, GivenPrompt, WrittenPrompt, append, fingerprint, is_usable
from drafters.training.frozen import FrozenTarget
from drafters.training.writing import ANSWER_TEMPERATURES, Writer

LONGEST_PASSAGE = 1999
COMPOSED = ("math_multilingual", "rag", "translation")


def text(name: str, num_chars: int) -> str:
    """Of words that no other text has."""
    words = (f"{name}{i}" for i in itertools.count())
    return " ".join(itertools.islice(words, num_chars))[: num_chars - 1] + "."


def prompts(num: int = 12) -> list[GivenPrompt]:
    found = []
    for i in range(num):
        found += [
            GivenPrompt("math", text(f"sum{i}x", 60 + 20 * i)),
            GivenPrompt("qa", text(f"who{i}x", 40 + 30 * i)),
            GivenPrompt("rag", f"Read this.\n\n{text(f'passage{i}x', LONGEST_PASSAGE - 12 - 100 * (i % 3))}"),
            GivenPrompt("code", text(f"def{i}x", 100)),
        ]
    return found


def test_it_is_a_function_of_prompts_and_seed() -> None:
    assert compose(prompts(), 3) == compose(prompts(), 3)
    assert compose(prompts(), 3) != compose(prompts(), 4)


def test_there_are_as_many_of_each_kind_as_prompts_in_a_domain() -> None:
    assert Counter(p.domain for p in compose(prompts(), 0)) == dict.fromkeys(COMPOSED, 12)


def test_what_is_composed_is_short_enough_to_be_used() -> None:
    """Also where the passages are the longest that there are, and four of them would not fit."""
    composed = [prompt for seed in range(20) for prompt in compose(prompts(), seed)]
    assert all(is_usable(prompt.prompt) for prompt in composed)
    longest = max(len(prompt.prompt) for prompt in composed if prompt.domain == "rag")
    assert LONGEST_PASSAGE < longest <= MAX_PROMPT_CHARS


def test_only_texts_that_suit_the_task_are_in_it() -> None:
    """Problems are answered in another language, questions asked of passages, without what those were asked before; code
    is in none."""
    for prompt in compose(prompts(), 0):
        assert "def" not in prompt.prompt
        assert "Read this." not in prompt.prompt
        held = {name for name in ("sum", "who", "passage") if f"{name}0" in prompt.prompt or f"{name}1" in prompt.prompt}
        allowed = {"math_multilingual": {"sum"}, "rag": {"who", "passage"}, "translation": {"sum", "who"}}[prompt.domain]
        assert held <= allowed


@pytest.mark.parametrize(
    ("domain", "num_chars", "expected"),
    [
        ("math", 100, {"math_multilingual", "translation"}),
        ("qa", 100, {"translation"}),
        ("rag", 1000, set()),
        ("math", 29, set()),
        ("qa", 400, set()),
        ("code", 100, set()),
    ],
)
def test_without_the_texts_of_a_task_it_is_not_composed(domain: str, num_chars: int, expected: set[str]) -> None:
    assert {p.domain for p in compose([GivenPrompt(domain, text("word", num_chars))], 0)} == expected
    assert compose([], 0) == []


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=torch.device("cpu"), dtype="float32", max_model_len=256)


def test_every_domain_of_every_source_takes_its_turn(target: FrozenTarget, tmp_path: Path) -> None:
    """However many prompts the others have: the first answers are those that are used."""
    for i in range(40):
        append(tmp_path / "prompts-0.jsonl", WrittenPrompt(i, ("math", "chat")[i % 2], text(f"own{i}x", 80)))
    given = [GivenPrompt("math", text(f"given{i}x", 80)) for i in range(5)] + [GivenPrompt("mine", text("minex", 80))]
    tasks = Writer(target, tmp_path, 0).tasks(40, given, frozenset())
    own, others = {fingerprint(text(f"own{i}x", 80)) for i in range(40)}, {fingerprint(p.prompt) for p in given}

    def source(key: str) -> str:
        return "own" if key in own else "given" if key in others else "composed"

    first = Counter((source(task.key), task.domain) for task in tasks[: 6 * len(ANSWER_TEMPERATURES)])
    queues = [("own", "chat"), ("own", "math"), ("given", "math"), ("given", "mine")]
    queues += [("composed", "math_multilingual"), ("composed", "translation")]
    assert first == dict.fromkeys(queues, len(ANSWER_TEMPERATURES))
    assert len({task.name for task in tasks}) == len(tasks)


def test_nothing_is_composed_from_what_is_left_out(target: FrozenTarget, tmp_path: Path) -> None:
    given = prompts()
    secret = [p for p in given if "3x" in p.prompt or "7x" in p.prompt]
    tasks = Writer(target, tmp_path, 0).tasks(0, given, frozenset(fingerprint(p.prompt) for p in secret))
    assert {task.domain for task in tasks} >= set(COMPOSED)
    assert not [task for task in tasks if any(f"{name}{i}x" in task.prompt for name in ("sum", "who") for i in (3, 7))]
    assert not [task for task in tasks if "passage3x" in task.prompt or "passage7x" in task.prompt]
