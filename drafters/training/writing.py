"""Prompts and answers written by the target itself, through our own engine in large batches."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.types import ModelInfo, Request, SamplingParams
from drafters.training.corpus import Answer, WrittenPrompt, append, fingerprint, is_usable, read_answers, read_prompts
from drafters.training.starters import STARTERS
from engine.offline import generate
from engine.target import TargetEngine
from router.cost_model import CostModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int], None]  # told of tokens or prompts as they are written

# Self-written prompts come at a high temperature, for breadth; the answers as they will be asked for.
PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_P = 0.98
MAX_PROMPT_TOKENS = 320
ANSWER_TEMPERATURES = (0.0, 0.7)
_MARK = "\u241e"  # stands for the user's words while the template is cut


class Writer:
    """A target that writes. ``folder`` gets prompts.jsonl and answers.jsonl, and what stands there already is kept."""

    def __init__(
        self,
        engine: TargetEngine,
        model: ModelInfo,
        cost: CostModel,
        tokenizer: "PreTrainedTokenizerBase",
        folder: Path,
        seed: int,
    ) -> None:
        self._engine, self._model, self._cost = engine, model, cost
        self._tokenizer = tokenizer
        self._prompts_path = folder / "prompts.jsonl"
        self._answers_path = folder / "answers.jsonl"
        self._seed = seed

    def write_prompts(self, num_prompts: int, progress: Progress) -> int:
        """Until the file holds num_prompts. Returns how many it holds."""
        seen = {fingerprint(p.prompt) for p in read_prompts(self._prompts_path)}
        num_kept = len(seen)
        if num_kept >= num_prompts:
            return num_kept
        before, _ = self._template()
        rng = random.Random(f"{self._seed} prompts {num_kept}")
        domains = sorted(STARTERS)
        beginnings: dict[str, tuple[str, str]] = {}

        def requests() -> Iterator[Request]:
            while num_kept < num_prompts:
                domain = rng.choice(domains)
                starter = rng.choice(STARTERS[domain])
                ids = self._encode(before + starter)
                sampling = SamplingParams(
                    max_tokens=MAX_PROMPT_TOKENS,
                    temperature=PROMPT_TEMPERATURE,
                    top_p=PROMPT_TOP_P,
                    seed=rng.getrandbits(63),
                )
                name = f"p{len(beginnings)}"
                beginnings[name] = (domain, starter)
                yield Request(name, ids, sampling, arrival_s=float(len(beginnings)))

        for request, token_ids in generate(self._engine, self._model, self._cost, requests(), max_in_flight=64):
            domain, starter = beginnings[request.id]
            text = starter + self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
            key = fingerprint(text)
            if token_ids[-1] not in self._model.eos_token_ids or not is_usable(text) or key in seen:
                continue  # cut off, useless, or known
            seen.add(key)
            append(self._prompts_path, [WrittenPrompt(domain, text.strip())])
            num_kept += 1
            progress(1)
        return num_kept

    def write_answers(self, given: Sequence[WrittenPrompt], num_tokens: int, max_tokens: int, progress: Progress) -> int:
        """Answers to the given and the self-written prompts in a shuffled order, each at one of the temperatures, until
        the file holds num_tokens or everything is answered at each. Returns how many tokens it holds."""
        prompts = [*given, *read_prompts(self._prompts_path)]
        tasks = [(i, temperature) for i in range(len(prompts)) for temperature in ANSWER_TEMPERATURES]
        random.Random(self._seed).shuffle(tasks)
        done = {(answer.prompt_token_ids, answer.temperature) for answer in read_answers(self._answers_path)}
        num_written = sum(len(answer.answer_token_ids) for answer in read_answers(self._answers_path))

        def requests() -> Iterator[Request]:
            for i, temperature in tasks:
                if num_written >= num_tokens:
                    return
                ids = self._encode(self._chat(prompts[i].prompt))
                if (ids, temperature) in done or len(ids) + max_tokens > self._model.max_model_len:
                    continue
                seed = random.Random(f"{self._seed} {i} {temperature}").getrandbits(63)
                sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
                yield Request(f"{i}:{temperature}", ids, sampling, arrival_s=float(i))

        for request, token_ids in generate(self._engine, self._model, self._cost, requests(), max_in_flight=64):
            i, temperature = request.id.split(":")
            answer = Answer(request.prompt_token_ids, token_ids, prompts[int(i)].domain, float(temperature))
            num_written += append(self._answers_path, [answer])
            progress(len(token_ids))
        return num_written

    def _chat(self, prompt: str) -> str:
        before, after = self._template()
        return before + prompt + after

    def _template(self) -> tuple[str, str]:
        """The chat template before the user's words, and from them to the answer."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(text).partition(_MARK)
        return before, after

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
