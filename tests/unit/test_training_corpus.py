"""Training data: prompts, answers, and the held-out split."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import InvalidField
from tests.support.random_answers import answer
from training.corpus import (
    WrittenPrompt,
    append,
    fingerprint,
    hold_out,
    is_usable,
    read_answers,
    read_given,
    read_written,
    repair,
)
from training.frozen import FrozenTarget
from training.writing import Share, Writer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_model_folder: Path) -> FrozenTarget:
    return FrozenTarget(tiny_model_folder, device=CPU, dtype="float32", max_model_len=256)


def test_answers_are_held_out_by_prompt() -> None:
    both = [answer(f"k{i}", 2, 3, t) for i in range(20) for t in (0.0, 0.7)]
    learned, held_out = hold_out(both, 0.1)
    assert len(held_out) == 4
    assert not {a.key for a in learned} & {a.key for a in held_out}
    assert [len(part) for part in hold_out(both[:4], 0.1)] == [2, 2]
    assert [len(part) for part in hold_out(both, 0.1, at_least=8)] == [28, 12]


def test_prompts_composed_of_held_out_texts_are_not_trained_on() -> None:
    """Only a share of them is evaluated on, so that they do not replace all other prompts."""
    texts = [answer(f"k{i:02}", 2, 3, t) for i in range(40) for t in (0.0, 0.7)]
    rng = random.Random(0)
    composed = [
        replace(answer(f"c{i:02}", 2, 3), sources=tuple(f"k{j:02}" for j in rng.sample(range(40), 4))) for i in range(50)
    ]
    learned, held_out = hold_out([*texts, *composed], 0.1)
    held = {a.key for a in held_out if not a.sources}
    assert len(held) == 4
    assert not {a.key for a in learned} & {a.key for a in held_out}
    assert all(held.isdisjoint(a.sources) for a in learned)
    tasks = [a for a in held_out if a.sources]
    assert len(tasks) == 5
    assert not any(held.isdisjoint(a.sources) for a in tasks)
    assert len(learned) + sum(not held.isdisjoint(a.sources) for a in composed) + 8 == len(texts) + len(composed)


def test_answers_of_older_files_have_no_sources(tmp_path: Path) -> None:
    new, old = replace(answer("new", 2, 3), sources=("a", "b")), answer("old", 2, 3)
    append(tmp_path / "answers-0.jsonl", new)
    append(tmp_path / "answers-0.jsonl", old)
    lines = [json.loads(line) for line in (tmp_path / "answers-0.jsonl").read_text().splitlines()]
    del lines[1]["sources"]
    (tmp_path / "answers-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_answers([tmp_path / "answers-0.jsonl"])) == [new, old]


def test_prompts_are_split_at_line_feeds_only(tmp_path: Path) -> None:
    text = "one line\u2028with a line separator\x0bin it"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    (given,) = read_given([tmp_path / "p.jsonl"], None)
    assert (given.domain, given.prompt) == ("p", text)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine one"}\n{"question": "?"}\n')
    with pytest.raises(InvalidField, match=r"bad\.jsonl:2"):
        read_given([tmp_path / "bad.jsonl"], None)


def test_an_unfinished_line_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "prompts-0.jsonl"
    append(path, WrittenPrompt(0, "chat", "whole"))
    with path.open("a") as file:
        file.write('{"index": 1, "dom')
    assert [w.index for w in read_written([path])] == [0]
    repair(path)
    append(path, WrittenPrompt(1, "chat", None))
    assert [w.index for w in read_written([path])] == [0, 1]
    with path.open("ab") as file:
        file.write(b"\0\0\n")
    with pytest.raises(InvalidField, match=r"prompts-0\.jsonl:3"):
        list(read_written([path]))


@pytest.mark.parametrize("text", ["short", "x" * 5000, "with <|im_end|> inside it", "cut \ufffd in the middle", "so " * 40])
def test_unusable_prompts_are_detected(text: str) -> None:
    assert not is_usable(text)


def test_prompts_differing_in_case_and_punctuation_are_duplicates(target: FrozenTarget, tmp_path: Path) -> None:
    for i, prompt in enumerate(["What is a river?", "what is  a river", "What is a lake?", "Where is the evaluation?"]):
        append(tmp_path / "prompts-0.jsonl", WrittenPrompt(i, "qa", prompt))
    tasks = Writer(target, tmp_path, 0).tasks(4, [], frozenset({fingerprint("where is THE evaluation")}))
    assert [t.prompt for t in tasks if t.temperature == 0.0] == ["What is a river?", "What is a lake?"]


def test_shares_divide_the_work(target: FrozenTarget) -> None:
    names = [f"{i}" for i in range(50)]
    parts = [Share(rank, 3).of(names) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert sorted(i for rank in range(3) for i in Share(rank, 3).attempts(2)) == list(range(16))
