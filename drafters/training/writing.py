"""Prompts and answers written by the target itself, through our own engine in large batches.

What is written is a function of (target, seed, prompts), not of the order in which it is finished: every attempt at a prompt
and every answer has a name, a seed from it, and a line of its own, so that whoever was killed goes on with what is missing.
(In bfloat16 a tie in rounding may fall differently in another batch; in float32 it does not.)
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import GenerationFailed
from cluster.types import Request, SamplingParams
from drafters.training.composed import compose
from drafters.training.corpus import (
    Answer,
    GivenPrompt,
    WrittenPrompt,
    append,
    fingerprint,
    is_usable,
    read_answers,
    read_written,
    repair,
)
from drafters.training.frozen import WRITING_COST, FrozenTarget
from drafters.training.progress import OrderedProgress
from drafters.training.starters import STARTERS
from engine.offline import generate

Progress = Callable[[int], None]  # told of tokens or prompts as they are written
Expired = Callable[[], bool]  # whether the time for this step is over

# Self-written prompts come at a high temperature, for breadth; the answers as they will be asked for.
PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_P = 0.98
MAX_LINE_TOKENS = 72
MAX_PROMPT_TOKENS = 200
ANSWER_TEMPERATURES = (0.0, 0.7)
_MAX_ATTEMPTS = 8  # per prompt wanted: a model that cannot write prompts must not be asked for ever
_MARK = "\u241e"  # stands for the user's words while the template is cut


@dataclass(frozen=True, slots=True)
class Share:
    """Of several processes that write into one folder, this is number ``rank`` of ``num``. Each has files of its own."""

    rank: int = 0
    num: int = 1

    def path(self, folder: Path, kind: str) -> Path:
        return folder / f"{kind}-{self.rank}.jsonl"

    def all(self) -> "list[Share]":
        return [Share(rank, self.num) for rank in range(self.num)]

    def part(self, total: int) -> int:
        return -(-total // self.num)

    def attempts(self, num_prompts: int) -> range:
        """Its numbers of attempts at prompts."""
        return range(self.rank, _MAX_ATTEMPTS * num_prompts, self.num)

    def of(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if _number(name) % self.num == self.rank]


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
    """A target that writes into ``folder``; what stands there already is kept."""

    def __init__(self, target: FrozenTarget, folder: Path, seed: int, share: Share | None = None) -> None:
        self._target = target
        self._folder = folder
        self._seed = seed
        self._share = share or Share()
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("prompts", "answers"):
            repair(self._share.path(folder, kind))
        self._before, self._after = _template(target)

    def write_prompts(self, num_prompts: int, progress: Progress, expired: Expired = lambda: False) -> None:
        """Until the first attempts hold num_prompts that came to something."""
        path = self._share.path(self._folder, "prompts")
        done = {written.index: int(written.prompt is not None) for written in self._written()}
        front = OrderedProgress(self._share.attempts(num_prompts), done)
        num_wanted = self._share.part(num_prompts)
        progress(front.size)
        starters: dict[str, tuple[int, str, str]] = {}
        newlines = _newline_tokens(self._target)

        def requests() -> Iterator[Request | None]:
            for index in front.missing():
                while front.has_enough_under_way(num_wanted):
                    yield None
                if front.size >= num_wanted or expired():
                    return
                rng = random.Random(f"{self._seed} prompt {index}")
                domain = rng.choice(sorted(STARTERS))
                beginnings = STARTERS[domain]
                starter = rng.choice(beginnings.beginnings)
                token_ids = self._target.encode(self._before + starter)
                if not token_ids:  # an empty beginning, and a template without anything before it
                    append(path, WrittenPrompt(index, domain, None))
                    front.done(index, 0)
                    continue
                front.begin(index)
                starters[f"{index}"] = (index, domain, starter)
                sampling = SamplingParams(
                    max_tokens=MAX_LINE_TOKENS if beginnings.one_line else MAX_PROMPT_TOKENS,
                    temperature=PROMPT_TEMPERATURE,
                    top_p=PROMPT_TOP_P,
                    seed=rng.getrandbits(63),
                    stop_token_ids=newlines if beginnings.one_line else (),
                )
                yield Request(f"{index}", token_ids, sampling, arrival_s=float(index))

        for request, token_ids in self._generate(requests(), num_wanted):
            index, domain, starter = starters.pop(request.id)
            text = starter + self._target.decode(token_ids)
            was_cut = len(token_ids) == request.sampling.max_tokens and token_ids[-1] not in self._target.info.eos_token_ids
            prompt = _whole_part(text) if was_cut else text.strip()
            usable = is_usable(prompt) and len(prompt) > len(starter.strip())
            append(path, WrittenPrompt(index, domain, prompt if usable else None))
            front.done(index, int(usable))
            progress(int(usable))

    def tasks(self, num_prompts: int, given: Sequence[GivenPrompt], left_out: frozenset[str]) -> list[AnswerTask]:
        """What is to be answered, each at each temperature: the first num_prompts self-written prompts, some composed of
        these and the given ones, and the given ones, without duplicates and without those whose fingerprint is ``left_out``.

        The first answers are those that are used, so prompts take turns: a given one, then another, as long as there are
        both; whoever gives prompts tells what the drafter is for, and the others keep it from being good for nothing else.
        Among the given ones their domains take turns, among the others the domains of the self-written and the composed.
        """
        written = {w.index: w for w in self._written()}
        sizes = {index: int(w.prompt is not None) for index, w in written.items()}
        used = {
            i
            for share in self._share.all()
            for i in OrderedProgress(share.attempts(num_prompts), sizes).first(share.part(num_prompts))
        }
        chosen = [written[index] for index in sorted(used)]
        known: set[str] = set()

        def new(prompts: Iterable[GivenPrompt]) -> list[GivenPrompt]:
            found = []
            for prompt in prompts:
                key = fingerprint(prompt.prompt)
                if key not in left_out and key not in known and is_usable(prompt.prompt):
                    known.add(key)
                    found.append(prompt)
            return found

        self_written = new(GivenPrompt(w.domain, w.prompt) for w in chosen if w.prompt is not None)
        given = new(given)
        num_each = max(Counter(prompt.domain for prompt in self_written).values(), default=0)
        composed = new(compose([*self_written, *given], self._seed, num_each))
        others = _in_turns([*_by_domain(self_written), *_by_domain(composed)])
        return [
            AnswerTask(fingerprint(prompt.prompt), prompt.domain, prompt.prompt, temperature, prompt.sources)
            for prompt in _in_turns([_in_turns(_by_domain(given)), others])
            for temperature in ANSWER_TEMPERATURES
        ]

    def write_answers(
        self,
        tasks: Sequence[AnswerTask],
        num_tokens: int,
        max_tokens: int,
        progress: Progress,
        expired: Expired = lambda: False,
    ) -> None:
        """Until the answers to the first of the tasks hold num_tokens, or all are answered. To a prompt that is too long for
        the target the answer is empty."""
        path = self._share.path(self._folder, "answers")
        by_name = {task.name: task for task in tasks}
        front = OrderedProgress(self._share.of(by_name), {_name(a): len(a.answer_token_ids) for a in self._known()})
        num_wanted = self._share.part(num_tokens)
        progress(front.size)

        def requests() -> Iterator[Request | None]:
            for i, name in enumerate(front.missing()):
                while front.has_enough_under_way(num_wanted):
                    yield None
                if front.size >= num_wanted or expired():
                    return
                task = by_name[name]
                token_ids = self._target.encode(self._before + task.prompt + self._after)
                if len(token_ids) + max_tokens > self._target.info.max_model_len:
                    append(path, Answer(task.key, task.domain, task.temperature, 0, (), (), task.sources))
                    front.done(name, 0)
                    continue
                seed = random.Random(f"{self._seed} answer {name}").getrandbits(63)
                sampling = SamplingParams(max_tokens=max_tokens, temperature=task.temperature, seed=seed)
                front.begin(name)
                yield Request(name, token_ids, sampling, arrival_s=float(i))

        for request, answer in self._generate(requests(), num_wanted // max_tokens + 1):
            task = by_name[request.id]
            seed = request.sampling.seed
            prompt_token_ids = request.prompt_token_ids
            append(path, Answer(task.key, task.domain, task.temperature, seed, prompt_token_ids, answer, task.sources))
            front.done(task.name, len(answer))
            progress(len(answer))

    def answers(self, tasks: Sequence[AnswerTask], num_tokens: int) -> list[Answer]:
        """The answers to the first of the tasks that together hold num_tokens, fewer if there are not so many. Sources are
        as the tasks have them: files of older versions do not tell."""
        known = {_name(a): a for a in self._known()}
        sizes = {name: len(a.answer_token_ids) for name, a in known.items()}
        names = [task.name for task in tasks]
        used = {
            n for share in self._share.all() for n in OrderedProgress(share.of(names), sizes).first(share.part(num_tokens))
        }
        return [replace(known[task.name], sources=task.sources) for task in tasks if task.name in used]

    def _written(self) -> list[WrittenPrompt]:
        return list(read_written(self._paths("prompts")))

    def _known(self) -> list[Answer]:
        return list(read_answers(self._paths("answers")))

    def _paths(self, kind: str) -> list[Path]:
        """The files of all who write here."""
        return sorted(self._folder.glob(f"{kind}-*.jsonl"))

    def _generate(self, requests: Iterable[Request | None], num_enough: int) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """As many at once as the target can hold, and no more than may be needed: the last to be asked for may not count."""
        target = self._target
        max_in_flight = max(1, min(target.limits.max_in_flight, num_enough))
        try:
            yield from generate(target.new_engine(), target.info, WRITING_COST, requests, max_in_flight=max_in_flight)
        except GenerationFailed as error:
            raise GenerationFailed(
                f"the target could not write: {error}; what it wrote so far is kept in {self._folder}: mend the cause, and "
                "run the same command again"
            ) from error


def _by_domain(prompts: Iterable[GivenPrompt]) -> list[list[GivenPrompt]]:
    queues: dict[str, list[GivenPrompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.domain, []).append(prompt)
    return [queues[domain] for domain in sorted(queues)]


def _in_turns(queues: Iterable[Sequence[GivenPrompt]]) -> list[GivenPrompt]:
    """One of each, again and again, as long as a queue has any."""
    return [prompt for turn in itertools.zip_longest(*queues) for prompt in turn if prompt is not None]


def _number(name: str) -> int:
    return int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16)


def _name(answer: Answer) -> str:
    return f"{answer.key} {answer.temperature}"


def _whole_part(text: str) -> str:
    """Up to the last line or sentence that is whole; all of it, if there is none."""
    ends = [text.rfind(mark) for mark in ("\n", ". ", "? ", "! ", "。", ";")]
    return text[: max(ends) + 1].strip() if max(ends) > 0 else text.strip()


def _newline_tokens(target: FrozenTarget) -> tuple[int, ...]:
    """The tokens that end a line."""
    texts = target.tokenizer.batch_decode([[i] for i in range(target.info.vocab_size)])
    return tuple(i for i, text in enumerate(texts) if "\n" in text)


def _template(target: FrozenTarget) -> tuple[str, str]:
    """The chat template before the user's words, and from them to the answer."""
    if not target.tokenizer.chat_template:
        return "", "\n"
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(text).partition(_MARK)
    return before, after
