"""Timed drafts for profiles: batches of drafts, and a draft after catching up."""

import random
from typing import Protocol

from cluster.types import SamplingParams
from drafters.protocol import Demand, Drafter
from drafters.session import key_of
from profiler.stopwatch import Stopwatch

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAFT_LENS = (1, 2, 4, 8, 16, 32, 64)
NEWS = (1, 4, 16, 64, 256)
CONTEXT_LEN = 192
PERIOD = 24  # the text repeats itself, so that lookups have something to say
_ROOM = 96  # committed one by one before a request starts over
_SAMPLING = SamplingParams(max_tokens=2**20, temperature=0.0, ignore_eos=True)


class Backing(Protocol):
    """The target of a drafter that reads its hidden states."""

    def hold(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Computes all of a sequence, replacing the one held."""

    def drop(self, request_id: str) -> None: ...


class NoBacking:
    """For drafters that read nothing of the target."""

    def hold(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        return

    def drop(self, request_id: str) -> None:
        return


class DrafterProbe:
    """``drafter`` must follow no request; ``close`` releases what it was made to follow.

    Between drafts, each request of a batch is committed one token of its text, as after a round whose first token was wrong.

    Args:
        longest_context: maximum context of the drafter, if known.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        stopwatch: Stopwatch,
        backing: Backing | None = None,
        longest_context: int = 2**20,
    ) -> None:
        self._drafter = drafter
        self._stopwatch = stopwatch
        self._backing = backing or NoBacking()
        # Kept off the ends of a vocabulary, where special tokens live.
        self._rng = random.Random(0)
        self._vocab = range(vocab_size // 8, vocab_size - vocab_size // 8)
        self._context_len = min(CONTEXT_LEN, longest_context - _ROOM - max(DRAFT_LENS))
        self._news = [n for n in NEWS if self._context_len + n + 1 <= longest_context]
        self._texts: dict[str, tuple[int, ...]] = {}
        self._told: dict[str, int] = {}

    def draft_grid(self, max_batch: int, max_draft_len: int) -> list[tuple[int, int]]:
        lens = sorted({length for length in DRAFT_LENS if length < max_draft_len} | {max_draft_len})
        return [(batch, length) for batch in BATCHES if batch <= max_batch for length in lens]

    def news_grid(self) -> list[tuple[int, int]]:
        return [(num, 0) for num in self._news]

    def draft(self, batch: int, draft_len: int) -> float:
        """Seconds of a batch of drafts."""
        names = [key_of(0, f"probe-draft-{i}") for i in range(batch)]
        for name in names:
            if name not in self._told or self._told[name] + 1 > len(self._texts[name]):
                self._start(name, self._context_len, _ROOM)
                self._propose([name], 1)
            self._tell(name, 1)
        return self._propose(names, draft_len)

    def catch_up(self, num_tokens: int, _: int = 0) -> float:
        """Seconds of a draft of one token after so many new committed tokens."""
        name = key_of(0, "probe-news")
        self._start(name, self._context_len, num_tokens)
        self._propose([name], 1)
        self._tell(name, num_tokens)
        return self._propose([name], 1)

    def close(self) -> None:
        for name in self._texts:
            self._drafter.release(name)
            self._backing.drop(name.partition("/")[2])
        self._texts.clear()
        self._told.clear()

    def _start(self, name: str, context_len: int, room: int) -> None:
        period = self._rng.choices(self._vocab, k=PERIOD)
        length = context_len + room
        text = tuple((period * (length // PERIOD + 1))[:length])
        # Of n committed tokens the target has computed n - 1: the text has one more than is ever told.
        self._backing.hold(name.partition("/")[2], (*text, text[0]))
        self._drafter.open(name, text[:context_len], context_len, _SAMPLING)
        self._texts[name], self._told[name] = text, context_len

    def _tell(self, name: str, num_tokens: int) -> None:
        told = self._told[name]
        self._drafter.extend(name, self._texts[name][told : told + num_tokens])
        self._told[name] = told + num_tokens

    def _propose(self, names: list[str], draft_len: int) -> float:
        demands = [Demand(name, draft_len) for name in names]
        self._stopwatch.start()
        self._drafter.propose(demands)
        return self._stopwatch.stop()
