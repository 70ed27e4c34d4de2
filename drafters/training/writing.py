"""Prompts and answers written by the target itself, through our own engine in large batches.

What is written is a function of (target, seed, prompts), not of the order in which it is finished: every attempt at a prompt
and every answer has a name, a seed from it, and a line of its own, so that whoever was killed goes on with what is missing.
(In bfloat16 a tie in rounding may fall differently in another batch; in float32 it does not.)
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.types import Request, SamplingParams
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

    def has(self, name: str) -> bool:
        return int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16) % self.num == self.rank


@dataclass(frozen=True, slots=True)
class AnswerTask:
    key: str
    domain: str
    prompt: str
    temperature: float

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
        """Until num_prompts attempts came to something, of which duplicates are left out later."""
        path = self._share.path(self._folder, "prompts")
        done = {written.index: written.prompt is not None for written in read_written(self._paths("prompts"))}
        num_kept = 0
        progress(sum(done.values()))
        num_wanted = -(-max(0, num_prompts - sum(done.values())) // self._share.num)
        starters: dict[str, tuple[int, str, str]] = {}
        newlines = _newline_tokens(self._target)

        def requests() -> Iterator[Request]:
            for index in range(self._share.rank, _MAX_ATTEMPTS * num_prompts, self._share.num):
                if num_kept >= num_wanted or expired():
                    return
                if index in done:
                    continue
                rng = random.Random(f"{self._seed} prompt {index}")
                domain = rng.choice(sorted(STARTERS))
                beginnings = STARTERS[domain]
                starter = rng.choice(beginnings.beginnings)
                starters[f"{index}"] = (index, domain, starter)
                sampling = SamplingParams(
                    max_tokens=MAX_LINE_TOKENS if beginnings.one_line else MAX_PROMPT_TOKENS,
                    temperature=PROMPT_TEMPERATURE,
                    top_p=PROMPT_TOP_P,
                    seed=rng.getrandbits(63),
                    stop_token_ids=newlines if beginnings.one_line else (),
                )
                yield Request(f"{index}", self._target.encode(self._before + starter), sampling, arrival_s=float(index))

        for request, token_ids in self._generate(requests(), num_wanted):
            index, domain, starter = starters.pop(request.id)
            text = starter + self._target.decode(token_ids)
            was_cut = len(token_ids) == request.sampling.max_tokens and token_ids[-1] not in self._target.info.eos_token_ids
            prompt = _whole_part(text) if was_cut else text.strip()
            usable = is_usable(prompt) and len(prompt) > len(starter.strip())
            append(path, WrittenPrompt(index, domain, prompt if usable else None))
            num_kept += usable
            progress(int(usable))

    def prompts(self, given: Sequence[GivenPrompt], left_out: frozenset[str]) -> list[AnswerTask]:
        """What is to be answered, each at each temperature: given and self-written prompts, without duplicates and without
        those whose fingerprint is ``left_out``, the domains taking turns, for the first answers are those that are used."""
        found: dict[str, GivenPrompt] = {}
        written = sorted(read_written(self._paths("prompts")), key=lambda w: w.index)
        self_written = (GivenPrompt(w.domain, w.prompt) for w in written if w.prompt is not None)
        for prompt in itertools.chain(self_written, given):
            key = fingerprint(prompt.prompt)
            if key not in left_out and is_usable(prompt.prompt):
                found.setdefault(key, prompt)
        by_domain: dict[str, list[AnswerTask]] = {}
        for key, prompt in found.items():
            for temperature in ANSWER_TEMPERATURES:
                task = AnswerTask(key, prompt.domain, prompt.prompt, temperature)
                by_domain.setdefault(prompt.domain, []).append(task)
        return [task for turn in itertools.zip_longest(*(by_domain[d] for d in sorted(by_domain))) for task in turn if task]

    def write_answers(
        self,
        tasks: Sequence[AnswerTask],
        num_tokens: int,
        max_tokens: int,
        progress: Progress,
        expired: Expired = lambda: False,
    ) -> None:
        """Until the answers to the first of the tasks hold num_tokens, or all are answered."""
        path = self._share.path(self._folder, "answers")
        num_done = {_name(a): len(a.answer_token_ids) for a in read_answers(self._paths("answers"))}
        mine = [task for task in tasks if self._share.has(task.name)]
        wanted = -(-num_tokens // self._share.num)
        progress(sum(num_done.get(task.name, 0) for task in mine))
        front = _Front([task.name for task in mine], num_done)
        by_id = {task.name: task for task in mine}

        def requests() -> Iterator[Request]:
            for i, task in enumerate(mine):
                if front.num_tokens >= wanted or expired():
                    return
                token_ids = self._target.encode(self._before + task.prompt + self._after)
                if task.name in num_done:
                    continue
                if len(token_ids) + max_tokens > self._target.info.max_model_len:
                    front.done(task.name, 0)
                    continue
                seed = random.Random(f"{self._seed} answer {task.name}").getrandbits(63)
                sampling = SamplingParams(max_tokens=max_tokens, temperature=task.temperature, seed=seed)
                yield Request(task.name, token_ids, sampling, arrival_s=float(i))

        for request, answer in self._generate(requests(), wanted // max_tokens + 1):
            task = by_id[request.id]
            seed = request.sampling.seed
            append(path, Answer(task.key, task.domain, task.temperature, seed, request.prompt_token_ids, answer))
            front.done(task.name, len(answer))
            progress(len(answer))

    def answers(self, tasks: Sequence[AnswerTask], num_tokens: int) -> list[Answer]:
        """The answers to the first of the tasks that together hold num_tokens, fewer if there are not so many."""
        known = {_name(a): a for a in read_answers(self._paths("answers"))}
        chosen: list[Answer] = []
        total = 0
        for task in tasks:
            answer = known.get(task.name)
            if answer is not None:
                if total >= num_tokens:
                    break
                chosen.append(answer)
                total += len(answer.answer_token_ids)
        return chosen

    def _paths(self, kind: str) -> list[Path]:
        """The files of all who write here."""
        return sorted(self._folder.glob(f"{kind}-*.jsonl"))

    def _generate(self, requests: Iterable[Request], num_enough: int) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """As many at once as the target can hold, and no more than may be needed: what is under way at the end is lost."""
        target = self._target
        max_in_flight = max(1, min(target.limits.max_in_flight, num_enough))
        return generate(target.new_engine(), target.info, WRITING_COST, requests, max_in_flight=max_in_flight)


class _Front:
    """How many tokens the tasks hold up to the first that is not done."""

    def __init__(self, names: Sequence[str], num_done: dict[str, int]) -> None:
        self._names = names
        self._num_done = dict(num_done)
        self._next = 0
        self.num_tokens = 0
        self._advance()

    def done(self, name: str, num_tokens: int) -> None:
        self._num_done[name] = num_tokens
        self._advance()

    def _advance(self) -> None:
        while self._next < len(self._names) and self._names[self._next] in self._num_done:
            self.num_tokens += self._num_done[self._names[self._next]]
            self._next += 1


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
