"""What a drafter learns from: prompts, given and self-written, and the target's own answers to them, in files that grow.

Every record is a line of JSON, written whole and flushed, so that a run that was cut off goes on where it stopped.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.errors import InvalidField

MIN_PROMPT_CHARS = 8
MAX_PROMPT_CHARS = 4000
EVALUATION_FOLDER = "prompts"  # of the folder that holds the data: what is measured on, never trained on


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """``sources``: fingerprints of the prompts that it was composed of."""

    domain: str
    prompt: str
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """An attempt of the target at a prompt. ``prompt`` is None if it came to nothing worth an answer."""

    index: int
    domain: str
    prompt: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One dialogue turn as token ids: the prompt with its chat template, and what the target answered.

    ``key`` names the prompt, and is the same at each temperature. ``sources`` are the keys of those that it was composed of.
    """

    key: str
    domain: str
    temperature: float
    seed: int
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]
    sources: tuple[str, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.answer_token_ids

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)


def append(path: Path, record: Answer | WrittenPrompt) -> None:
    line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())


def repair(path: Path) -> None:
    """Cuts off a last line that a kill left unfinished, so that the next one does not go on in it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole_len = content.rfind(b"\n") + 1
        if whole_len < len(content):
            file.truncate(whole_len)


def read_written(paths: Iterable[Path]) -> Iterator[WrittenPrompt]:
    for record in _records(paths):
        yield WrittenPrompt(record["index"], record["domain"], record["prompt"])


def read_answers(paths: Iterable[Path]) -> Iterator[Answer]:
    for record in _records(paths):
        record["prompt_token_ids"] = tuple(record["prompt_token_ids"])
        record["answer_token_ids"] = tuple(record["answer_token_ids"])
        record["sources"] = tuple(record.get("sources", ()))
        yield Answer(**record)


def read_given(paths: Sequence[Path], data_folder: Path | None) -> list[GivenPrompt]:
    """The prompts of JSONL files, each line with a ``prompt`` and, maybe, a ``domain`` (else the file's name).

    Args:
        data_folder: whose ``prompts`` folder holds the evaluation sets. None: there are none on this machine.

    Raises:
        InvalidField: a file of the evaluation sets, or not such a file; names it, and the line.
    """
    prompts = []
    for path in paths:
        refuse_evaluation(path, data_folder)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would also cut at U+2028 inside a text
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidField("prompts", str(path), f"cannot be read as UTF-8 text ({error})") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_given(line, path, number))
    return prompts


def refuse_evaluation(path: Path, data_folder: Path | None) -> None:
    """Raises InvalidField for a file that drafters are measured on."""
    if data_folder is None:
        return
    held_back = (data_folder / EVALUATION_FOLDER).resolve()
    if path.resolve().is_relative_to(held_back):
        raise InvalidField(
            "prompts",
            str(path),
            f"lies in {held_back}, the evaluation sets: a drafter trained on them would show acceptance that does not hold; "
            "give other prompts, or none",
        )


def evaluation_fingerprints(data_folder: Path | None) -> frozenset[str]:
    """Of all evaluation prompts, so that copies of them are left out wherever they come from."""
    if data_folder is None:
        return frozenset()
    found = set()
    for path in sorted((data_folder / EVALUATION_FOLDER).glob("*.jsonl")):
        for record in _records([path]):
            found.add(fingerprint(str(record.get("prompt", ""))))
    return frozenset(found)


def is_usable(prompt: str) -> bool:
    """Whether a prompt is worth an answer: neither a stub, nor endless, nor a loop."""
    text = prompt.strip()
    if not MIN_PROMPT_CHARS <= len(text) <= MAX_PROMPT_CHARS or "<|" in text or "\ufffd" in text:
        return False
    words = re.findall(r"\w+", text)
    return len(words) < 20 or len(set(words)) > 0.25 * len(words)


def fingerprint(prompt: str) -> str:
    """Equal for prompts that differ in case, spacing or punctuation alone."""
    plain = " ".join(re.findall(r"\w+", prompt.lower())) or prompt
    return hashlib.blake2b(plain.encode(), digest_size=12).hexdigest()


def _given(line: str, path: Path, number: int) -> GivenPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidField("prompts", f"{path}:{number}", f"is not JSON ({error.msg})") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise InvalidField("prompts", f"{path}:{number}", 'must be an object with a text "prompt"')
    return GivenPrompt(str(record.get("domain", path.stem)), record["prompt"])


def _records(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        if not path.exists():
            continue
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # the last may have been cut off
                    yield json.loads(line)
