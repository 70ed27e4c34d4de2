"""Prompts to measure with: read from JSONL files, or made up, the same ones every time."""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from cluster.errors import InvalidField
from deploy.api.tokenizer import Tokenizer

MAX_TEXT_TOKENS = 1_000_000  # before a prompt is cut


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """What a user says; a chat template goes round it where the model has one."""

    id: str
    domain: str
    text: str


def load_prompts(paths: Sequence[Path], max_per_domain: int | None = None) -> list[BenchPrompt]:
    """The prompts of files, and of the ``*.jsonl`` of folders in name order, at most ``max_per_domain`` of each domain.

    A line is ``{"id": ..., "domain": ..., "prompt": ...}``; other keys are ignored.

    Raises:
        InvalidField: a path is missing, a folder has no such file, a line is not such an object, or there are no prompts.
    """
    prompts: list[BenchPrompt] = []
    num_taken: dict[str, int] = {}
    for file in (file for path in paths for file in _files(path)):
        for prompt in _read(file):
            taken = num_taken.get(prompt.domain, 0)
            if max_per_domain is None or taken < max_per_domain:
                num_taken[prompt.domain] = taken + 1
                prompts.append(prompt)
    if not prompts:
        raise InvalidField("prompts", [str(path) for path in paths], "hold no prompt")
    return prompts


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidField("prompts", str(path), "must be a JSONL file or a folder of them")
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise InvalidField("prompts", str(path), "the folder holds no *.jsonl file")
    return files


def _read(path: Path) -> Iterable[BenchPrompt]:
    try:
        # Not splitlines(), which also breaks at U+2028 and the like: JSON allows those within a string.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("prompts", str(path), f"cannot be read as UTF-8 text ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidField("prompts", f"{path}:{number}", f"is not JSON ({error.msg})") from error
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("id", "domain", "prompt")):
            raise InvalidField("prompts", f"{path}:{number}", 'must be {"id": ..., "domain": ..., "prompt": ...} of strings')
        yield BenchPrompt(entry["id"], entry["domain"], entry["prompt"])


class OfDomain(Protocol):
    @property
    def domain(self) -> str: ...


T = TypeVar("T", bound=OfDomain)


def spread(prompts: Sequence[T], num_prompts: int) -> list[T]:
    """The first ``num_prompts`` when the domains take turns, so that few prompts still cover many domains."""
    by_domain: dict[str, list[T]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    longest = max(map(len, by_domain.values()), default=0)
    in_turn = [domain[i] for i in range(longest) for domain in by_domain.values() if i < len(domain)]
    return in_turn[:num_prompts]


def choose_prompts(paths: Sequence[Path], num_prompts: int) -> list[BenchPrompt]:
    """``num_prompts`` over all domains: of the files where there are any (fewer if they hold fewer), else made up."""
    return spread(load_prompts(paths), num_prompts) if paths else synthetic_prompts(num_prompts)


def encode_chats(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Each as a chat of one message."""

    async def encode() -> list[tuple[int, ...]]:
        chats = [[{"role": "user", "content": text}] for text in texts]
        return [await tokenizer.encode_chat(chat, max_tokens=MAX_TEXT_TOKENS) for chat in chats]

    return asyncio.run(encode())


_PEOPLE = ("Ada", "Bela", "Chioma", "Dmitri", "Emeka", "Farida", "Gao", "Hilde")
_PLACES = (
    "the harbour",
    "a railway station",
    "the northern market",
    "an old observatory",
    "the river bridge",
    "a seed library",
)
_THINGS = ("lanterns", "maps", "clocks", "kettles", "violins", "compasses", "ledgers", "kites")
_VERBS = ("repairs", "collects", "paints", "sells", "describes", "counts", "carries", "hides")
_TOPICS = ("tides", "bread", "bridges", "honey bees", "glass", "sleep", "snow", "libraries", "magnets", "rivers")
_COLUMNS = ("price", "weight", "height", "stock", "rating", "year")


def _repetitive(rng: random.Random) -> str:
    """Text that goes round in a circle: lookup drafters do well."""
    line = f"{rng.choice(_PEOPLE)} {rng.choice(_VERBS)} {rng.choice(_THINGS)} at {rng.choice(_PLACES)}."
    return "Continue this text in the same way.\n\n" + "\n".join(f"Day {i}: {line}" for i in range(1, rng.randint(5, 9)))


def _code(rng: random.Random) -> str:
    column, other = rng.sample(_COLUMNS, 2)
    return (
        "Complete this Python function.\n\n"
        f"def mean_{column}(rows: list[dict[str, float]], min_{other}: float) -> float:\n"
        f'    """The mean {column} of the rows whose {other} is at least min_{other}; 0.0 if there are none."""\n'
    )


def _prose(rng: random.Random) -> str:
    person, other = rng.sample(_PEOPLE, 2)
    return (
        f"Write a short story in which {person} {rng.choice(_VERBS)} {rng.choice(_THINGS)} near {rng.choice(_PLACES)} "
        f"and meets {other}, who knows a secret about {rng.choice(_TOPICS)}."
    )


def _list(rng: random.Random) -> str:
    return f"List {rng.randint(5, 12)} facts about {rng.choice(_TOPICS)}, numbered, one sentence each."


def _arithmetic(rng: random.Random) -> str:
    boxes, each, sold = rng.randint(3, 9), rng.randint(4, 20), rng.randint(2, 11)
    return (
        f"{rng.choice(_PEOPLE)} has {boxes} boxes with {each} {rng.choice(_THINGS)} in each and sells {sold} of them. "
        "How many are left? Explain step by step."
    )


def _copying(rng: random.Random) -> str:
    """A rewriting task: most of the answer stands in the prompt."""
    rows = [f"{rng.choice(_THINGS)}, {rng.choice(_COLUMNS)}, {rng.randint(1, 99)}" for _ in range(rng.randint(4, 7))]
    return "Rewrite these lines as a JSON array of objects with the keys item, field and value.\n\n" + "\n".join(rows)


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "repetitive": _repetitive,
    "code": _code,
    "prose": _prose,
    "list": _list,
    "arithmetic": _arithmetic,
    "copying": _copying,
}


def synthetic_prompts(num_prompts: int, seed: int = 0) -> list[BenchPrompt]:
    """Made-up prompts of several kinds in turn, from very predictable answers to free ones; a function of its arguments."""
    rng = random.Random(seed)
    kinds = list(_KINDS.items())
    prompts = []
    for i in range(num_prompts):
        kind, make = kinds[i % len(kinds)]
        prompts.append(BenchPrompt(f"synthetic/{kind}/{seed}/{i}", kind, make(rng)))
    return prompts
