"""Prompts from files and made-up ones."""

import json
from pathlib import Path

import pytest

from benchmarks.prompts import choose_prompts, load_prompts, spread, synthetic_prompts
from cluster.errors import InvalidField


def _write(path: Path, domain: str, num: int) -> Path:
    path.write_text(
        "".join(json.dumps({"id": f"{domain}/{i}", "domain": domain, "prompt": f"say {i}"}) + "\n" for i in range(num))
    )
    return path


def test_a_folder_is_read_in_name_order_with_a_limit_per_domain(tmp_path: Path) -> None:
    _write(tmp_path / "b.jsonl", "math", 3)
    _write(tmp_path / "a.jsonl", "code", 2)
    assert [p.id for p in load_prompts([tmp_path], max_per_domain=2)] == ["code/0", "code/1", "math/0", "math/1"]


def test_the_limit_counts_a_domain_over_all_files(tmp_path: Path) -> None:
    files = [_write(tmp_path / "a.jsonl", "chat", 2), _write(tmp_path / "b.jsonl", "chat", 2)]
    assert len(load_prompts(files, max_per_domain=3)) == 3


def test_spread_takes_domains_in_turn(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", "code", 5)
    _write(tmp_path / "b.jsonl", "math", 1)
    assert [p.id for p in spread(load_prompts([tmp_path]), 4)] == ["code/0", "math/0", "code/1", "code/2"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    file = tmp_path / "a.jsonl"
    entry = {"id": "a", "domain": "d", "prompt": text}
    file.write_bytes(f"{json.dumps(entry, ensure_ascii=False)}\r\n".encode() * 2)
    assert [p.text for p in load_prompts([file])] == [text, text]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x", "domain": "y"}', '{"id": 1, "domain": "y", "prompt": "z"}'])
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    file = _write(tmp_path / "a.jsonl", "code", 1)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(InvalidField, match=r"a\.jsonl:2"):
        load_prompts([file])


def test_missing_files_empty_folders_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="must be a JSONL file"):
        load_prompts([tmp_path / "none"])
    with pytest.raises(InvalidField, match=r"holds no \*\.jsonl"):
        load_prompts([tmp_path])
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(InvalidField, match="hold no prompt"):
        load_prompts([tmp_path])


def test_synthetic_prompts_are_of_many_kinds_distinct_and_the_same_every_time() -> None:
    prompts = synthetic_prompts(48)
    assert prompts == synthetic_prompts(48)
    assert prompts[:12] == synthetic_prompts(12)
    assert prompts != synthetic_prompts(48, seed=1)
    assert len({p.domain for p in prompts}) == 6
    assert len({p.text for p in prompts}) >= 44


def test_choose_prompts_falls_back_to_synthetic_ones(tmp_path: Path) -> None:
    assert choose_prompts((), 3) == synthetic_prompts(3)
    assert [p.domain for p in choose_prompts((_write(tmp_path / "a.jsonl", "code", 5),), 3)] == ["code"] * 3
