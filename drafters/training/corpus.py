"""What a drafter learns from: prompts, given and self-written, and the target's own answers to them, in files that grow.

Every record is a line of JSON, written whole and flushed, so that a run that was cut off goes on where it stopped.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIN_PROMPT_CHARS = 8
MAX_PROMPT_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Answer:
    """One dialogue turn as token ids: the prompt with its chat template, and what the target answered."""

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]
    domain: str
    temperature: float


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    domain: str
    prompt: str


def append(path: Path, records: Iterable[Answer | WrittenPrompt]) -> int:
    """Appends records; returns how many tokens the answers among them hold."""
    num_tokens = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            num_tokens += len(record.answer_token_ids) if isinstance(record, Answer) else 0
            file.write(json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) + "\n")
    return num_tokens


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers of a file; none if there is no file."""
    for record in _read(path):
        yield Answer(
            tuple(record["prompt_token_ids"]),
            tuple(record["answer_token_ids"]),
            record["domain"],
            record["temperature"],
        )


def read_prompts(path: Path) -> Iterator[WrittenPrompt]:
    """The prompts of a JSONL file of ours, or of any with a ``prompt`` and, maybe, a ``domain``."""
    for record in _read(path):
        yield WrittenPrompt(str(record.get("domain", path.stem)), str(record["prompt"]))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # the last may have been cut off
                yield json.loads(line)


def is_usable(prompt: str) -> bool:
    """Whether a self-written prompt is worth an answer: neither a stub, nor endless, nor a loop."""
    text = prompt.strip()
    if not MIN_PROMPT_CHARS <= len(text) <= MAX_PROMPT_CHARS or "<|" in text or "\ufffd" in text:
        return False
    words = re.findall(r"\w+", text)
    return len(words) < 20 or len(set(words)) > 0.25 * len(words)


def fingerprint(prompt: str) -> bytes:
    """Equal for prompts that differ in case, spacing or punctuation alone."""
    plain = " ".join(re.findall(r"\w+", prompt.lower()))
    return hashlib.blake2b(plain.encode(), digest_size=12).digest()
