"""Prompts and answers written by the target, through the serving engine in large batches.

Each prompt attempt and each answer has a name, a seed derived from it and a line of its own, so the text does not depend on
the order in which requests finish, and an interrupted run resumes with what is missing.
"""

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from cluster.errors import GenerationFailed
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from engine.offline import generate
from training.corpus import (
    GivenPrompt,
    TargetAnswer,
    WrittenPrompt,
    append,
    compose,
    fingerprint,
    is_usable,
    read_answers,
    read_written,
    repair,
)
from training.frozen import WRITING_COST, FrozenTarget

Name = TypeVar("Name", bound=Hashable)


class OrderedProgress(Generic[Name]):
    """Items to be done in order, each of some size. ``size`` is that of the done items before the first missing one."""

    def __init__(self, names: Sequence[Name], sizes: Mapping[Name, int]) -> None:
        self._names = names
        self._sizes = dict(sizes)
        finished = [sizes[name] for name in names if name in sizes]
        self._total, self._num_finished = sum(finished), len(finished)
        self._num_in_order = 0
        self._in_flight: set[Name] = set()
        self.size = 0
        self._advance()

    def missing(self) -> Iterator[Name]:
        return (name for name in self._names if name not in self._sizes)

    def begin(self, name: Name) -> None:
        self._in_flight.add(name)

    def has_enough_in_flight(self, size: int) -> bool:
        """Whether finished and started items probably reach ``size``, by the mean size of the finished ones."""
        mean = self._total / self._num_finished if self._num_finished else 0.0
        return bool(self._in_flight) and self._total + len(self._in_flight) * mean >= size

    def done(self, name: Name, size: int) -> None:
        self._sizes[name] = size
        self._total += size
        self._num_finished += 1
        self._in_flight.discard(name)
        self._advance()

    def first(self, size: int) -> Iterator[Name]:
        """The first items that together reach ``size``, or all that are done in order."""
        total = 0
        for name in self._names[: self._num_in_order]:
            if total >= size:
                return
            total += self._sizes[name]
            yield name

    def _advance(self) -> None:
        while self._num_in_order < len(self._names) and self._names[self._num_in_order] in self._sizes:
            self.size += self._sizes[self._names[self._num_in_order]]
            self._num_in_order += 1


@dataclass(frozen=True, slots=True)
class Starters:
    texts: tuple[str, ...]
    one_line: bool  # prompts end with their first line; longer ones are rarely ended by the model itself


_STARTERS_FILE = Path(__file__).with_name("starters.json")
STARTERS = {
    domain: Starters(tuple(starters["texts"]), starters["one_line"])
    for domain, starters in json.loads(_STARTERS_FILE.read_text(encoding="utf-8")).items()
}


Tell = Callable[[float], None]  # called with the prompts or tokens written so far
Expired = Callable[[], bool]  # whether the time of this step is over

# Prompts are sampled at a high temperature for variety, answers as they will be served.
PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_P = 0.98
MAX_LINE_TOKENS = 72
MAX_PROMPT_TOKENS = 200
ANSWER_TEMPERATURES = (0.0, 0.7)
_MAX_ATTEMPTS = 8  # per prompt wanted, so that a model that writes no usable prompts does not loop forever
_PLACEHOLDER = "\u241e"  # for the user's words, where the template is split


@dataclass(frozen=True, slots=True)
class Share:
    """The part of process ``rank`` of ``num`` that write into one folder, each its own files."""

    rank: int = 0
    num: int = 1

    def path(self, folder: Path, kind: str) -> Path:
        return folder / f"{kind}-{self.rank}.jsonl"

    def all(self) -> "list[Share]":
        return [Share(rank, self.num) for rank in range(self.num)]

    def quota(self, total: int) -> int:
        return -(-total // self.num)

    def attempts(self, num_prompts: int) -> range:
        return range(self.rank, _MAX_ATTEMPTS * num_prompts, self.num)

    def of(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if _hash(name) % self.num == self.rank]


@dataclass(frozen=True, slots=True)
class AnswerTask:
    key: str
    domain: str
    prompt: str
    temperature: float
    sources: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.key} {self.temperature}"


class Writer:
    """Writes prompts and answers of the target into ``folder``, after those already there."""

    def __init__(self, target: FrozenTarget, folder: Path, seed: int, share: Share | None = None) -> None:
        self._target = target
        self._folder = folder
        self._seed = seed
        self._share = share or Share()
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("prompts", "answers"):
            repair(self._share.path(folder, kind))
        self._before, self._after = _template(target)

    def write_prompts(self, num_prompts: int, tell: Tell, expired: Expired = lambda: False) -> None:
        """Writes until the first attempts include ``num_prompts`` usable prompts."""
        path = self._share.path(self._folder, "prompts")
        done = {written.index: int(written.prompt is not None) for written in self._written()}
        newlines = _newline_tokens(self._target)
        end_ids = self._target.info.eos_token_ids

        def request(index: int, arrival_s: float) -> Request | None:
            rng, domain, starters, starter = self._attempt(index)
            token_ids = self._target.encode(self._before + starter)
            if not token_ids:  # an empty starter, and a template without text before it
                append(path, WrittenPrompt(index, domain, None))
                return None
            sampling = SamplingParams(
                max_tokens=MAX_LINE_TOKENS if starters.one_line else MAX_PROMPT_TOKENS,
                temperature=PROMPT_TEMPERATURE,
                top_p=PROMPT_TOP_P,
                seed=rng.getrandbits(63),
                stop_token_ids=newlines if starters.one_line else (),
            )
            return Request(f"{index}", token_ids, sampling, arrival_s=arrival_s)

        def store(request: Request, token_ids: tuple[int, ...]) -> tuple[int, int]:
            index = int(request.id)
            _, domain, _, starter = self._attempt(index)
            text = starter + self._target.decode(token_ids)
            was_cut = len(token_ids) == request.sampling.max_tokens and token_ids[-1] not in end_ids
            prompt = _whole_part(text) if was_cut else text.strip()
            usable = is_usable(prompt) and len(prompt) > len(starter.strip())
            append(path, WrittenPrompt(index, domain, prompt if usable else None))
            return index, int(usable)

        num_wanted = self._share.quota(num_prompts)
        progress = OrderedProgress(self._share.attempts(num_prompts), done)
        self._write(progress, num_wanted, num_wanted, request, store, tell, expired)

    def tasks(self, num_prompts: int, given: Sequence[GivenPrompt], left_out: frozenset[str]) -> list[AnswerTask]:
        """The prompts to answer, each at each temperature, without duplicates and fingerprints in ``left_out``: given ones,
        the first ``num_prompts`` self-written ones, and prompts composed of both.

        Only the first answers are used, so given prompts and others alternate, and domains take turns among each.
        """
        written = {w.index: w for w in self._written()}
        sizes = {index: int(w.prompt is not None) for index, w in written.items()}
        used = {
            i
            for share in self._share.all()
            for i in OrderedProgress(share.attempts(num_prompts), sizes).first(share.quota(num_prompts))
        }
        known: set[str] = set()

        def new(prompts: Iterable[GivenPrompt]) -> list[GivenPrompt]:
            found = []
            for prompt in prompts:
                key = fingerprint(prompt.prompt)
                if key not in left_out and key not in known and is_usable(prompt.prompt):
                    known.add(key)
                    found.append(prompt)
            return found

        chosen = (written[index] for index in sorted(used))
        self_written = new(GivenPrompt(w.domain, w.prompt) for w in chosen if w.prompt is not None)
        given = new(given)
        num_each = max(Counter(prompt.domain for prompt in self_written).values(), default=0)
        composed = new(compose([*self_written, *given], self._seed, num_each))
        others = _alternate([*_by_domain(self_written), *_by_domain(composed)])
        return [
            AnswerTask(fingerprint(prompt.prompt), prompt.domain, prompt.prompt, temperature, prompt.sources)
            for prompt in _alternate([_alternate(_by_domain(given)), others])
            for temperature in ANSWER_TEMPERATURES
        ]

    def write_answers(
        self, tasks: Sequence[AnswerTask], num_tokens: int, max_tokens: int, tell: Tell, expired: Expired = lambda: False
    ) -> None:
        """Writes until the answers to the first tasks hold ``num_tokens``. Too long a prompt gets an empty answer."""
        path = self._share.path(self._folder, "answers")
        by_name = {task.name: task for task in tasks}

        def store(name: str, seed: int, prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[str, int]:
            task = by_name[name]
            append(path, TargetAnswer(task.key, task.domain, task.temperature, seed, prompt, answer, task.sources))
            return name, len(answer)

        def request(name: str, arrival_s: float) -> Request | None:
            task = by_name[name]
            token_ids = self._target.encode(self._before + task.prompt + self._after)
            if len(token_ids) + max_tokens > self._target.info.max_model_len:
                store(name, 0, (), ())
                return None
            seed = random.Random(f"{self._seed} answer {name}").getrandbits(63)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=task.temperature, seed=seed)
            return Request(name, token_ids, sampling, arrival_s=arrival_s)

        num_wanted = self._share.quota(num_tokens)
        progress = OrderedProgress(self._share.of(by_name), {a.name: len(a.answer_token_ids) for a in self._answered()})

        def store_request(request: Request, answer: tuple[int, ...]) -> tuple[str, int]:
            return store(request.id, request.sampling.seed, request.prompt_token_ids, answer)

        self._write(progress, num_wanted, num_wanted // max_tokens + 1, request, store_request, tell, expired)

    def answers(self, tasks: Sequence[AnswerTask], num_tokens: int) -> list[TargetAnswer]:
        """The answers to the first tasks that together hold ``num_tokens``, or fewer."""
        known = {a.name: a for a in self._answered()}
        sizes = {name: len(a.answer_token_ids) for name, a in known.items()}
        names = [task.name for task in tasks]
        parts = [(OrderedProgress(share.of(names), sizes), share.quota(num_tokens)) for share in self._share.all()]
        used = {name for progress, quota in parts for name in progress.first(quota)}
        return [replace(known[task.name], sources=task.sources) for task in tasks if task.name in used]

    def _attempt(self, index: int) -> tuple[random.Random, str, Starters, str]:
        """The generator, domain, its starters and the chosen one of a prompt attempt."""
        rng = random.Random(f"{self._seed} prompt {index}")
        domain = rng.choice(sorted(STARTERS))
        starters = STARTERS[domain]
        return rng, domain, starters, rng.choice(starters.texts)

    def _written(self) -> Iterator[WrittenPrompt]:
        return read_written(sorted(self._folder.glob("prompts-*.jsonl")))

    def _answered(self) -> Iterator[TargetAnswer]:
        return read_answers(sorted(self._folder.glob("answers-*.jsonl")))

    def _write(
        self,
        progress: OrderedProgress[Name],
        size: int,
        max_useful: int,
        request: Callable[[Name, float], Request | None],
        store: Callable[[Request, tuple[int, ...]], tuple[Name, int]],
        tell: Tell,
        expired: Expired,
    ) -> None:
        """Generates the missing items in order until ``progress`` reaches ``size``; ``max_useful`` bounds those in flight.

        ``request``: of an item and its arrival time; None: it is stored already, with size 0. ``store`` stores what was
        generated, and returns the item and its size.
        """
        num_written = progress.size
        tell(num_written)
        limit = max(1, min(self._target.limits.max_in_flight, max_useful))

        def requests() -> Iterator[Request | None]:
            for i, name in enumerate(progress.missing()):
                while progress.has_enough_in_flight(size):
                    yield None
                if progress.size >= size or expired():
                    return
                asked = request(name, float(i))
                if asked is None:
                    progress.done(name, 0)
                else:
                    progress.begin(name)
                    yield asked

        target = self._target
        try:
            finished = generate(target.new_engine(), target.info, WRITING_COST, requests(), max_in_flight=limit)
            for asked, token_ids in finished:
                name, num = store(asked, token_ids)
                progress.done(name, num)
                num_written += num
                tell(num_written)
        except GenerationFailed as error:
            reason = f"the target could not write: {error}; its output so far is kept in {self._folder}"
            raise GenerationFailed(f"{reason}: fix the cause, and run the same command again") from error


def _by_domain(prompts: Iterable[GivenPrompt]) -> list[list[GivenPrompt]]:
    queues: dict[str, list[GivenPrompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.domain, []).append(prompt)
    return [queues[domain] for domain in sorted(queues)]


def _alternate(queues: Iterable[Sequence[GivenPrompt]]) -> list[GivenPrompt]:
    """Round-robin over the queues until all are empty."""
    return [prompt for turn in itertools.zip_longest(*queues) for prompt in turn if prompt is not None]


def _hash(name: str) -> int:
    return int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16)


def _whole_part(text: str) -> str:
    """Up to the end of the last whole line or sentence; all of it if there is none."""
    ends = [text.rfind(mark) for mark in ("\n", ". ", "? ", "! ", "。", ";")]
    return text[: max(ends) + 1].strip() if max(ends) > 0 else text.strip()


def _newline_tokens(target: FrozenTarget) -> tuple[int, ...]:
    texts = target.tokenizer.batch_decode([[i] for i in range(target.info.vocab_size)])
    return tuple(i for i, text in enumerate(texts) if "\n" in text)


def _template(target: FrozenTarget) -> tuple[str, str]:
    """The chat template before the user's words, and after them up to the answer."""
    if not target.tokenizer.chat_template:
        return "", "\n"
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(text).partition(_PLACEHOLDER)
    return before, after
