"""A target and drafters small enough for thousands of simulated runs, with a real ledger and real noise.

The toy target's logits depend on the last three tokens before a position, read back from its own paged cache: a ledger
or a rollback that errs changes the output."""

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from drafters.protocol import Capabilities, Demand, Draft
from engine.kv_blocks import BlockLedger
from engine.noise import gumbel, noise_keys
from router.plan import Capacity, Span

VOCAB_SIZE = 12
EOS = 0
MODEL = ModelInfo("toy", VOCAB_SIZE, max_model_len=96, eos_token_ids=(EOS,), tokenizer_fingerprint="toy")
CONTEXT_LEN = 3


def logits_after(context: Sequence[int], spread: float = 3.0) -> np.ndarray:
    """(VOCAB_SIZE,) logits, a fixed function of the last CONTEXT_LEN tokens. Not to be written to."""
    return _logits(bytes(context[-CONTEXT_LEN:]), spread)


@functools.cache
def _logits(tail: bytes, spread: float) -> np.ndarray:
    digest = hashlib.blake2b(tail, digest_size=8).digest()
    return spread * np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(VOCAB_SIZE)


def choose(context: Sequence[int], sampling: SamplingParams) -> int:
    """The toy target's token after ``context``."""
    return _choose(bytes(context[-CONTEXT_LEN:]), len(context), sampling.temperature, sampling.seed)


@functools.lru_cache(maxsize=4096)
def _choose(tail: bytes, position: int, temperature: float, seed: int) -> int:
    """Cached: target, drafters and the plain run ask for the same tokens."""
    logits = logits_after(tail)
    if temperature == 0.0:
        return int(np.argmax(logits))
    keys = noise_keys(np.array([seed], np.uint64), np.array([position], np.int64))
    noise = gumbel(keys[:, None], np.arange(VOCAB_SIZE, dtype=np.int64)[None, :])[0]
    return int(np.argmax(logits / temperature + noise))


def plain_run(request: Request) -> tuple[int, ...]:
    """The output of the target alone, which all drafting must reproduce."""
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < request.sampling.max_tokens and len(token_ids) < MODEL.max_model_len:
        token = choose(token_ids, request.sampling)
        token_ids.append(token)
        output.append(token)
        if token in request.sampling.stop_token_ids or (token == EOS and not request.sampling.ignore_eos):
            break
    return tuple(output)


@dataclass
class ToyTarget:
    """A TargetEngine whose cache slots hold the tokens themselves."""

    num_blocks: int = 32
    block_len: int = 4
    max_num_sequences: int = 8
    max_pass_tokens: int = 32
    prefix_cache: bool = True
    _sampling: dict[str, SamplingParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(self.num_blocks, self.block_len, self.prefix_cache)
        self._slots = np.full(self.num_blocks * self.block_len, -1)

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        self._sampling[request.id] = request.sampling
        return self.ledger.open(request.id, token_ids)

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        return self.ledger.num_cached(request.id, token_ids)

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        assert sum(len(span.token_ids) for span in spans) <= self.max_pass_tokens
        assert len({span.request_id for span in spans}) == len(spans) <= self.max_num_sequences
        checkpoints = self.ledger.speculate_all({span.request_id: span.token_ids for span in spans})
        for span in spans:
            assert self.ledger.computed_len(span.request_id) == span.base_len
            table = self.ledger.block_table(span.request_id)
            for i, token in enumerate(span.token_ids):
                self._slots[self._slot(table, span.base_len + i)] = token
            if not span.samples:
                self.ledger.commit(checkpoints[span.request_id], len(span.token_ids))
                continue
            num_known, drafts = span.num_compute, span.drafts
            chosen: list[int] = []
            for i in range(span.num_drafts + 1):
                end = span.base_len + num_known + i
                context = [int(self._slots[self._slot(table, t)]) for t in range(end)]
                chosen.append(choose(context, self._sampling[span.request_id]))
                if i == span.num_drafts or chosen[-1] != drafts[i]:
                    break
            num_accepted = len(chosen) - 1
            self.ledger.commit(checkpoints[span.request_id], num_known + num_accepted)
            span.chosen, span.num_accepted = tuple(chosen), num_accepted
        return spans

    def release(self, request_id: str) -> None:
        self.ledger.forget(request_id)
        if self._sampling.pop(request_id, None) is not None:
            self.ledger.release(request_id)

    def capacity(self) -> Capacity:
        return Capacity(
            self.block_len,
            self.num_blocks,
            self.ledger.num_free_blocks,
            self.max_num_sequences,
            self.max_pass_tokens,
            MODEL.max_model_len,
        )

    def check_integrity(self) -> None:
        self.ledger.check_integrity()

    def _slot(self, table: np.ndarray, position: int) -> int:
        return int(table[position // self.block_len]) * self.block_len + position % self.block_len


@dataclass
class ToyDrafter:
    """Knows the target's rule and errs with probability ``error``; may also propose nothing or stop short."""

    rng: random.Random
    error: float = 0.3
    silence: float = 0.1
    _followed: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    capabilities = Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._followed[request_id] = (list(token_ids), sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._followed[request_id][0].extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def check_integrity(self) -> None:
        assert all(token_ids for token_ids, _ in self._followed.values())

    @property
    def num_followed(self) -> int:
        return len(self._followed)

    def _draft(self, demand: Demand) -> Draft:
        token_ids, sampling = self._followed[demand.request_id]
        context = [*token_ids, *demand.ahead]
        drafts: list[int] = []
        num_tokens = 0 if self.rng.random() < self.silence else self.rng.randint(1, demand.num_tokens)
        for _ in range(num_tokens):
            wrong = self.rng.random() < self.error
            drafts.append(self.rng.randrange(VOCAB_SIZE) if wrong else choose([*context, *drafts], sampling))
        return Draft(demand.request_id, tuple(drafts), (1.0 - self.error,) * len(drafts))
