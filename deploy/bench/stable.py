"""Targets, recorded answers and fresh drafters: what the comparison of drafters is made with."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import DrafterConfig
from cluster.types import ModelInfo, Request, SamplingParams
from deploy.api.tokenizer import Tokenizer
from drafters.companions import Host, feature_layers
from drafters.protocol import Drafter
from drafters.registry import make_drafter
from drafters.replay import Recording
from engine.calibration import measure_cost
from engine.factory import load_model
from engine.kv_cache import BLOCK_LEN
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.native import NativeLimits, NativeTarget
from engine.offline import generate
from engine.target import SpanInput
from profiler.prompts import Prompt

MAX_PROMPT_LEN = 1024
MAX_BATCH = 32  # recorded or replayed at once
MAX_PASS_TOKENS = 512


class Stable:
    """Loads the model once, in bf16 as it is served.

    ``plain`` is the target alone; ``target`` keeps the hidden states that some of ``drafters`` read.
    """

    def __init__(self, model: str, drafters: Sequence[DrafterConfig], max_new_tokens: int) -> None:
        self._folder = ensure_model(model)
        network = load_model(self._folder)
        config = network.config
        self._max_len = min(config.max_len, MAX_PROMPT_LEN + max_new_tokens)
        self.info = ModelInfo(model, config.vocab_size, self._max_len, config.eos_token_ids, fingerprint(self._folder))
        num_blocks = MAX_BATCH * (self._max_len // BLOCK_LEN + 1)
        limits = NativeLimits(num_blocks, BLOCK_LEN, MAX_BATCH, MAX_PASS_TOKENS, self._max_len)
        self.plain = NativeTarget(network, limits)
        layers = feature_layers(drafters)
        self.target = NativeTarget(network, limits, prefix_cache=False, feature_layers=layers) if layers else self.plain
        self.cost = measure_cost(self.plain)
        self._max_new_tokens = max_new_tokens

    def make(self, drafter: DrafterConfig) -> Drafter:
        """A new one each time, for most of them learn: nobody shall know an answer from having seen it before."""
        return make_drafter(drafter, self.info, Host(self.target, self._folder) if drafter.is_companion else None)

    def record(self, prompts: Sequence[Prompt], temperature: float) -> list[Recording]:
        """The target's answers, in an order in which the domains are mixed, the same one every time."""
        encoded = self._encode(prompts)
        mixed = random.Random(0).sample(range(len(prompts)), len(prompts))
        # Replayed requests are known to drafters by the names that a loop gives them: link number and request.
        names = {f"{prompts[i].id}@{temperature}": i for i in mixed}
        requests = [
            Request(
                name,
                encoded[i][-(self._max_len - self._max_new_tokens) :],
                SamplingParams(max_tokens=self._max_new_tokens, temperature=temperature, seed=i + 1),
                arrival_s=order * 1e-6,
            )
            for order, (name, i) in enumerate(names.items())
        ]
        outputs = {
            request.id: tokens
            for request, tokens in generate(self.plain, self.info, self.cost, requests, max_in_flight=MAX_BATCH)
        }
        return [
            Recording(f"0/{r.id}", prompts[names[r.id]].domain, r.prompt_token_ids, outputs[r.id], r.sampling)
            for r in requests
        ]

    def _encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        tokenizer = Tokenizer.from_folder(self._folder)

        async def encode() -> list[tuple[int, ...]]:
            return [
                tuple(await tokenizer.encode_chat([{"role": "user", "content": prompt.text}], max_tokens=2**17))
                for prompt in prompts
            ]

        return asyncio.run(encode())


@dataclass(frozen=True, slots=True)
class TargetBehind:
    """``drafters.replay.Behind``: holds replayed answers in a target, so that drafters can read its hidden states."""

    target: NativeTarget

    def hold(self, recording: Recording) -> None:
        request = as_request(recording)
        token_ids = (*recording.prompt_token_ids, *recording.output_token_ids)
        start = self.target.open(request, token_ids)
        while start < len(token_ids):
            chunk = token_ids[start : start + MAX_PASS_TOKENS]
            self.target.execute([SpanInput(request.id, start, chunk, samples=False)])
            start += len(chunk)

    def drop(self, recording: Recording) -> None:
        self.target.release(as_request(recording).id)


def as_request(recording: Recording, arrival_s: float = 0.0) -> Request:
    return Request(recording.name.partition("/")[2], recording.prompt_token_ids, recording.sampling, arrival_s)
