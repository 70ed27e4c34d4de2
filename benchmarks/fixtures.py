"""Targets, recorded answers and fresh drafters for comparing drafters."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from benchmarks.prompts import BenchPrompt, encode_chats
from cluster.config import DrafterConfig
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from deploy.api.tokenizer import Tokenizer
from drafters.hidden_states.host import Host
from drafters.protocol import Drafter
from drafters.registry import feature_layers, make_drafter
from drafters.replay import Recording
from engine.cpu_setup import in_own_thread
from engine.factory import load_model
from engine.kv_cache import BLOCK_LEN
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.native import NativeLimits, NativeTarget
from engine.offline import generate
from engine.pass_timing import measure_cost
from engine.target import compute
from profiler.online_cost import OnlineCost

MAX_PROMPT_LEN = 1024
MAX_BATCH = 32  # answers recorded or held at once
MAX_PASS_TOKENS = 512


class Fixtures:
    """Loads the model once, in bf16 as served.

    ``plain`` is the target alone; ``target`` also keeps the hidden states that some of ``drafters`` read.
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
        layers = feature_layers(drafters, self._folder)
        self.make_target = partial(NativeTarget, network, limits, feature_layers=layers)
        self.target = self.make_target() if layers else self.plain
        self.measured_cost = measure_cost(self.plain)
        self.cost = OnlineCost(self.measured_cost)  # corrected online, as when serving
        self._max_new_tokens = max_new_tokens

    def make(self, drafter: DrafterConfig, target: NativeTarget | None = None) -> Drafter:
        """A new drafter each time: most learn, and none may have seen an answer before. ``target``: whose hidden states it
        reads; None: ``target`` of the fixtures."""
        host = Host(target or self.target, self._folder) if drafter.is_colocated else None
        return in_own_thread(lambda: make_drafter(drafter, self.info, host))

    def record(
        self, prompts: Sequence[BenchPrompt], temperatures: Sequence[float]
    ) -> Iterator[Mapping[float, Sequence[Recording]]]:
        """The target's answers by temperature, MAX_BATCH prompts at a time, in a fixed order that mixes domains. The
        target's cache still holds most of the yielded answers, so ``holding`` them is cheap."""
        encoded = self._encode(prompts)
        mixed = random.Random(0).sample(range(len(prompts)), len(prompts))
        for start in range(0, len(mixed), MAX_BATCH):
            part = mixed[start : start + MAX_BATCH]
            asked = [(t, i, self._request(prompts[i].id, encoded[i], t, i + 1)) for t in temperatures for i in part]
            requests = [request for _, _, request in asked]
            outputs = {r.id: tokens for r, tokens in generate(self.target, self.info, self.cost, requests, MAX_BATCH)}
            yield {
                t: [
                    # Drafters know replayed requests by a loop's keys: link number and request.
                    Recording(f"0/{r.id}", prompts[i].domain, r.prompt_token_ids, outputs[r.id], r.sampling)
                    for temperature, i, r in asked
                    if temperature == t
                ]
                for t in temperatures
            }

    @contextmanager
    def holding(self, recordings: Sequence[Recording]) -> Iterator[None]:
        """Computes the hidden states of whole answers, at most MAX_BATCH, for drafters that read them."""
        held = recordings if self.target.feature_layers else ()
        for one in held:
            token_ids = (*one.prompt_token_ids, *one.output_token_ids)
            compute(self.target, as_request(one), token_ids, len(token_ids))
        try:
            yield
        finally:
            for recording in held:
                self.target.release(as_request(recording).id)

    def requests(self, prompts: Sequence[BenchPrompt], temperature: float) -> list[Request]:
        return [
            self._request(prompt.id, ids, temperature, i + 1)
            for i, (prompt, ids) in enumerate(zip(prompts, self._encode(prompts), strict=True))
        ]

    def _request(self, prompt_id: str, prompt: tuple[int, ...], temperature: float, seed: int) -> Request:
        sampling = SamplingParams(max_tokens=self._max_new_tokens, temperature=temperature, seed=seed)
        return Request(
            f"{prompt_id}@{temperature}", prompt[-(self._max_len - self._max_new_tokens) :], sampling, arrival_s=float(seed)
        )

    def _encode(self, prompts: Sequence[BenchPrompt]) -> list[tuple[int, ...]]:
        return encode_chats(Tokenizer.from_folder(self._folder), [prompt.text for prompt in prompts])


def as_request(recording: Recording) -> Request:
    return Request(recording.name.partition("/")[2], recording.prompt_token_ids, recording.sampling, 0.0)
