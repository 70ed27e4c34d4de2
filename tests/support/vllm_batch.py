"""Batches that behave as those of vLLM's model runner, for a proposer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.acceptance import common_prefix_len

MAX_ROWS, MAX_MODEL_LEN, DRAFT_LEN, VOCAB = 6, 256, 8, 100
COPIED_TEXT_LEN = 7  # of the target below
PASS_S = 0.01


def vllm_config(device: str = "cpu") -> SimpleNamespace:
    model = SimpleNamespace(max_model_len=MAX_MODEL_LEN, model="tiny", tokenizer="tiny", get_vocab_size=lambda: VOCAB)
    return SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFT_LEN),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
    )


def ticking() -> Callable[[], float]:
    """A clock on which each pass takes PASS_S, whatever its rows."""
    return count(0.0, PASS_S).__next__


def next_token(token_ids: Sequence[int]) -> int:
    """A target that mostly repeats itself, and differs by prompt."""
    return token_ids[-COPIED_TEXT_LEN] if len(token_ids) % 5 else (token_ids[0] + len(token_ids)) % VOCAB


@dataclass
class Batch:
    """The rows of vLLM's runner: the last row fills the place of one that ends; prompts may take several passes."""

    propose: Callable[..., list[list[int]]]
    token_ids: Any = field(default_factory=lambda: np.full((MAX_ROWS + 2, MAX_MODEL_LEN), -7, np.int32))
    lens: Any = field(default_factory=lambda: np.zeros(MAX_ROWS + 2, np.int32))
    rows: list[str] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)  # of all requests, ended ones included
    drafts: dict[str, list[int]] = field(default_factory=dict)
    num_accepted: int = 0

    def add(self, name: str, prompt: Sequence[int] = ()) -> None:
        """A new request, or with its tokens so far one that was preempted."""
        text = self.texts.setdefault(name, list(prompt))
        self.rows.append(name)
        self._write(len(self.rows) - 1, text)

    def remove(self, name: str) -> None:
        index = self.rows.index(name)
        last = self.rows.pop()
        if last != name:
            self.rows[index] = last
            self._write(index, self.texts[last])
        self.drafts.pop(name, None)

    def swap(self, i: int, j: int) -> None:
        for index, name in ((i, self.rows[j]), (j, self.rows[i])):
            self._write(index, self.texts[name])
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]

    def run(self, in_prompt: Sequence[str] = (), *, tells: bool = True) -> None:
        """A pass. ``tells``: vLLM asks for drafts after it, which it does not near the end of the context."""
        sampled = [[] if name in in_prompt else self._verify(name) for name in self.rows]
        for index, new in enumerate(sampled):
            text = self.texts[self.rows[index]]
            text += new
            self._write(index, text)
        found = self.propose(sampled, self.lens, self.token_ids) if tells else [[0]] * len(sampled)
        self.drafts = dict(zip(self.rows, found, strict=True))

    def _verify(self, name: str) -> list[int]:
        text, drafts = list(self.texts[name]), self.drafts.get(name, [])
        expected: list[int] = []
        for _ in range(len(drafts) + 1):
            expected.append(next_token([*text, *expected]))
        num_right = common_prefix_len(drafts, expected)
        self.num_accepted += num_right
        return expected[: num_right + 1]

    def _write(self, index: int, text: Sequence[int]) -> None:
        self.token_ids[index, : len(text)] = text
        self.lens[index] = len(text)
