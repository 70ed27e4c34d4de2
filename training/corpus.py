"""Training data: prompts, given, written by the target, and composed of others for tasks that need a text; and the target's
answers, one line of JSON each."""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import InvalidField

MIN_PROMPT_CHARS = 8
MAX_PROMPT_CHARS = 4000
EVALUATION_FOLDER = "prompts"  # evaluation sets in the data folder, never trained on


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    domain: str
    prompt: str
    sources: tuple[str, ...] = ()  # fingerprints of the prompts that it was composed of


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """An attempt of the target to write a prompt; ``prompt`` is None if it is unusable."""

    index: int
    domain: str
    prompt: str | None


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """One dialogue turn as token ids: the prompt with its chat template, and the target's answer."""

    key: str  # fingerprint of the prompt
    domain: str
    temperature: float
    seed: int
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]
    sources: tuple[str, ...] = ()  # keys of the prompts that it was composed of

    @property
    def name(self) -> str:
        return f"{self.key} {self.temperature}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.answer_token_ids

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)


def append(path: Path, record: TargetAnswer | WrittenPrompt) -> None:
    line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())


def repair(path: Path) -> None:
    """Truncates an unfinished last line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def read_written(paths: Iterable[Path]) -> Iterator[WrittenPrompt]:
    return (WrittenPrompt(**record) for record in _records(paths))


def read_answers(paths: Iterable[Path]) -> Iterator[TargetAnswer]:
    for record in _records(paths):
        lists = {name: tuple(record.get(name, ())) for name in ("prompt_token_ids", "answer_token_ids", "sources")}
        yield TargetAnswer(**record | lists)


def read_given(paths: Sequence[Path], data_folder: Path | None) -> list[GivenPrompt]:
    """The prompts of JSONL files: a ``prompt`` on each line, and optionally a ``domain`` (default: the file's name).

    Raises InvalidField if a file is not of this format, or an evaluation set (in the ``prompts`` of ``data_folder``).
    """
    prompts = []
    held_back = None if data_folder is None else (data_folder / EVALUATION_FOLDER).resolve()
    for path in paths:
        if held_back is not None and path.resolve().is_relative_to(held_back):
            reason = f"lies in {held_back}, the evaluation sets: training on them would invalidate measured acceptance"
            raise InvalidField("prompts", str(path), f"{reason}; give other prompts, or none")
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would also cut at U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidField("prompts", str(path), f"cannot be read as UTF-8 text ({error})") from error
        prompts += [_given(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    return prompts


def evaluation_fingerprints(data_folder: Path | None) -> frozenset[str]:
    """Fingerprints of all evaluation prompts, to exclude copies of them."""
    if data_folder is None:
        return frozenset()
    paths = sorted((data_folder / EVALUATION_FOLDER).glob("*.jsonl"))
    return frozenset(fingerprint(str(record.get("prompt", ""))) for record in _records(paths))


def is_usable(prompt: str) -> bool:
    """Whether a prompt is worth an answer: not too short, too long or repetitive."""
    text = prompt.strip()
    if not MIN_PROMPT_CHARS <= len(text) <= MAX_PROMPT_CHARS or "<|" in text or "\ufffd" in text:
        return False
    words = re.findall(r"\w+", text)
    return len(words) < 20 or len(set(words)) > 0.25 * len(words)


def fingerprint(prompt: str) -> str:
    """A hash that ignores case, spacing and punctuation."""
    plain = " ".join(re.findall(r"\w+", prompt.lower())) or prompt
    return hashlib.blake2b(plain.encode(), digest_size=12).hexdigest()


def hold_out(
    answers: Sequence[TargetAnswer], share: float, at_least: int = 1
) -> tuple[list[TargetAnswer], list[TargetAnswer]]:
    """Answers to train on and answers to evaluate on, divided by prompt; no text is in both.

    Of the prompts that are not composed, ``share`` is held out: at least one, and ``at_least`` as far as these are a third
    at most. Composed prompts with a held-out source are evaluated on up to the same share; the rest is unused.
    """
    keys = sorted({answer.key for answer in answers if not answer.sources})  # hashes, so in random order
    held = set(keys[: max(1, round(share * len(keys)), min(at_least, len(keys) // 3))])
    composed = {answer.key: answer.sources for answer in answers if answer.sources}
    tainted = sorted(key for key, sources in composed.items() if not held.isdisjoint(sources))
    evaluated = held | set(tainted[: round(len(held) / len(keys) * len(composed))])
    excluded = held.union(tainted)
    return [a for a in answers if a.key not in excluded], [a for a in answers if a.key in evaluated]


def packed(answers: Iterable[TargetAnswer], max_tokens: int) -> Iterator[list[TargetAnswer]]:
    """Consecutive answers, together at most ``max_tokens`` long; a longer one alone."""
    part: list[TargetAnswer] = []
    num_tokens = 0
    for answer in answers:
        if part and num_tokens + len(answer.token_ids) > max_tokens:
            yield part
            part, num_tokens = [], 0
        part.append(answer)
        num_tokens += len(answer.token_ids)
    if part:
        yield part


def _given(line: str, path: Path, number: int) -> GivenPrompt:
    record = _record(line, path, number)
    if not isinstance(record.get("prompt"), str):
        raise InvalidField("prompts", f"{path}:{number}", 'must be an object with a text "prompt"')
    return GivenPrompt(str(record.get("domain", path.stem)), record["prompt"])


def _record(line: str | bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidField("prompts", f"{path}:{number}", f"is not JSON ({error})") from error
    return record if isinstance(record, dict) else {}


def _records(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        if not path.exists():
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):  # the last line may be unfinished
                    yield _record(line, path, number)


def choose_vocabulary(
    answers: Iterable[TargetAnswer], size: int, vocab_size: int, always: Iterable[int] = ()
) -> Tensor | None:
    """``size`` token ids, ascending, or None for all: ``always``, the most frequent in the answers, then the lowest ids."""
    if size >= vocab_size:
        return None
    counts = Counter(token_id for answer in answers for token_id in answer.answer_token_ids)
    ranked = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))
    chosen = dict.fromkeys([*always, *ranked, *range(vocab_size)])
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int64)


def coverage(vocabulary: Tensor | None, answers: Iterable[TargetAnswer]) -> float:
    """The share of answer tokens that are in the vocabulary."""
    token_ids = [token_id for answer in answers for token_id in answer.answer_token_ids]
    known = set(token_ids) if vocabulary is None else set(vocabulary.tolist())
    return sum(token_id in known for token_id in token_ids) / max(1, len(token_ids))


_TEXTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("composed_prompts.json").read_text(encoding="utf-8"))
_SENTENCE = range(30, 400)  # characters of a question or a text to translate
_PASSAGE = range(300, 2000)
_MAX_PASSAGES = 4
_TEMPLATE_CHARS = 100  # at most, around passages and question

_Source = tuple[str, str]  # a text, and the fingerprint of its prompt


def compose(prompts: Sequence[GivenPrompt], seed: int, num_each: int) -> list[GivenPrompt]:
    """At most ``num_each`` prompts of each kind, and at most as many as there are source texts. Deterministic."""

    def sources(lens: range, *domains: str) -> list[_Source]:
        return [
            (p.prompt, fingerprint(p.prompt))
            for domain in domains
            for p in prompts
            if p.domain == domain and len(p.prompt) in lens
        ]

    rng = random.Random(f"{seed} composed")
    sentences = sources(_SENTENCE, "math", "how_to", "qa", "chat")
    problems = sources(_SENTENCE, "math")
    questions = sources(_SENTENCE, "qa", "how_to")
    bodies = [(_without_instruction(text), key) for text, key in sources(_PASSAGE, "summarization", "rag")]
    passages = [body for body in bodies if len(body[0]) in _PASSAGE]

    def translation() -> GivenPrompt:
        template, language, (text, key) = (
            rng.choice(_TEXTS["translation"]),
            rng.choice(_TEXTS["languages"]),
            rng.choice(sentences),
        )
        return GivenPrompt("translation", template.format(language, text), (key,))

    def multilingual() -> GivenPrompt:
        template, (text, key) = rng.choice(_TEXTS["math_multilingual"]), rng.choice(problems)
        return GivenPrompt("math_multilingual", template.format(text), (key,))

    def rag() -> GivenPrompt:
        question, question_key = rng.choice(questions)
        chosen = rng.sample(passages, min(len(passages), rng.randint(1, _MAX_PASSAGES)))
        while len(chosen) > 1 and sum(len(text) for text, _ in chosen) > MAX_PROMPT_CHARS - len(question) - _TEMPLATE_CHARS:
            chosen.pop()
        text = rng.choice(_TEXTS["rag"]).format("\n\n".join(text for text, _ in chosen), question)
        return GivenPrompt("rag", text, (*(key for _, key in chosen), question_key))

    kinds: list[tuple[Callable[[], GivenPrompt], int]] = [
        (translation, len(sentences)),
        (multilingual, len(problems)),
        (rag, min(len(passages), len(questions))),
    ]
    return [make() for make, num_texts in kinds for _ in range(min(num_each, num_texts))]


def _without_instruction(text: str) -> str:
    """Drops a first paragraph that is shorter than the rest."""
    first, _, rest = text.partition("\n\n")
    return rest if len(first) < len(rest) else text
