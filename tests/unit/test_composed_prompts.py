"""Composed prompts, and the order of given, self-written and composed prompts."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from training.corpus import MAX_PROMPT_CHARS, GivenPrompt, WrittenPrompt, append, compose, fingerprint, is_usable
from training.frozen import FrozenTarget
from training.writing import ANSWER_TEMPERATURES, Writer

LONGEST_PASSAGE = 1999
COMPOSED = ("math_multilingual", "rag", "translation")


def text(name: str, num_chars: int) -> str:
    """A text of words that no other text contains."""
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


def test_composition_is_deterministic() -> None:
    assert compose(prompts(), 3, 12) == compose(prompts(), 3, 12)
    assert compose(prompts(), 3, 12) != compose(prompts(), 4, 12)


def test_the_number_of_each_kind_is_limited_by_request_and_texts() -> None:
    assert Counter(p.domain for p in compose(prompts(), 0, 7)) == dict.fromkeys(COMPOSED, 7)
    found = Counter(p.domain for p in compose(prompts(), 0, 1000))
    assert (found["translation"], found["math_multilingual"], found["rag"]) == (24, 12, 12)


def test_composed_prompts_name_their_sources() -> None:
    known = {fingerprint(prompt.prompt): prompt.prompt.removeprefix("Read this.\n\n") for prompt in prompts()}
    for prompt in compose(prompts(), 0, 12):
        held = {key for key, text in known.items() if text in prompt.prompt}
        assert held == set(prompt.sources)


def test_composed_prompts_are_short_enough() -> None:
    """Even with passages so long that four of them would not fit."""
    composed = [prompt for seed in range(20) for prompt in compose(prompts(), seed, 12)]
    assert all(is_usable(prompt.prompt) for prompt in composed)
    longest = max(len(prompt.prompt) for prompt in composed if prompt.domain == "rag")
    assert LONGEST_PASSAGE < longest <= MAX_PROMPT_CHARS


def test_only_suitable_texts_are_composed() -> None:
    """Problems for another language, questions about passages without their instruction; no code."""
    for prompt in compose(prompts(), 0, 12):
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
def test_a_task_without_texts_is_not_composed(domain: str, num_chars: int, expected: set[str]) -> None:
    assert {p.domain for p in compose([GivenPrompt(domain, text("word", num_chars))], 0, 5)} == expected
    assert compose([], 0, 5) == []


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=torch.device("cpu"), dtype="float32", max_model_len=256)


def test_given_and_other_prompts_alternate(target: FrozenTarget, tmp_path: Path) -> None:
    """Since only the first answers are used. Within each half the domains take turns."""
    for i in range(40):
        append(tmp_path / "prompts-0.jsonl", WrittenPrompt(i, ("math", "chat")[i % 2], text(f"own{i}x", 80)))
    given = [GivenPrompt("math", text(f"given{i}x", 80)) for i in range(9)] + [GivenPrompt("mine", text("minex", 80))]
    tasks = Writer(target, tmp_path, 0).tasks(40, given, frozenset())
    assert [task.temperature for task in tasks[:4]] == [*ANSWER_TEMPERATURES, *ANSWER_TEMPERATURES]
    assert len({task.name for task in tasks}) == len(tasks)
    keys = list(dict.fromkeys(task.key for task in tasks))
    is_given = {fingerprint(prompt.prompt) for prompt in given}
    assert [key in is_given for key in keys] == [True, False] * 10 + [False] * (len(keys) - 20)
    domains = {task.key: task.domain for task in tasks}
    assert [domains[key] for key in keys[:6:2]] == ["math", "mine", "math"]
    assert [domains[key] for key in keys[1:8:2]] == ["chat", "math", "math_multilingual", "translation"]
    sources = {task.key: task.sources for task in tasks}
    own = is_given | {fingerprint(text(f"own{i}x", 80)) for i in range(40)}
    assert all(set(sources[key]) <= own and bool(sources[key]) == (key not in own) for key in keys)


def test_given_prompts_alone_are_not_composed(target: FrozenTarget, tmp_path: Path) -> None:
    tasks = Writer(target, tmp_path, 0).tasks(0, prompts(), frozenset())
    assert {task.key for task in tasks} == {fingerprint(prompt.prompt) for prompt in prompts()}


def test_excluded_prompts_are_not_composed(target: FrozenTarget, tmp_path: Path) -> None:
    for i, prompt in enumerate(prompts()):
        append(tmp_path / "prompts-0.jsonl", WrittenPrompt(i, prompt.domain, prompt.prompt))
    secret = [prompt for prompt in prompts() if "3x" in prompt.prompt or "7x" in prompt.prompt]
    tasks = Writer(target, tmp_path, 0).tasks(48, [], frozenset(fingerprint(p.prompt) for p in secret))
    assert {task.domain for task in tasks} >= set(COMPOSED)
    assert not [task for task in tasks if any(f"{name}{i}x" in task.prompt for name in ("sum", "who") for i in (3, 7))]
    assert not [task for task in tasks if "passage3x" in task.prompt or "passage7x" in task.prompt]
