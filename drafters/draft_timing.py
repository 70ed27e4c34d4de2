"""Timed drafts for profiles: batches of drafts, and a draft after catching up with committed tokens."""

import random
from typing import Protocol

from cluster.sampling_params import SamplingParams
from drafters.protocol import Demand, Drafter
from drafters.session import key_of, request_id_of
from profiler.interleaved import Stopwatch

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRAFT_LENS = (1, 2, 4, 8, 16, 32, 64)
CATCH_UP_LENS = (1, 4, 16, 64, 256)
CONTEXT_LEN = 192
PERIOD = 24  # the text repeats itself, so that lookups draft
_MAX_NEW = 96  # tokens committed one by one before a request starts over
_SAMPLING = SamplingParams(max_tokens=2**20, temperature=0.0, ignore_eos=True)


class ProbeTarget(Protocol):
    """The target, for drafters that read its hidden states."""

    def hold(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Computes all of a sequence, replacing the one held."""

    def drop(self, request_id: str) -> None: ...


class DrafterProbe:
    """Times a drafter without requests, as after rounds whose first token was wrong. ``close`` releases the probe's."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        stopwatch: Stopwatch,
        target: ProbeTarget | None = None,
        max_context_len: int = 2**20,
    ) -> None:
        self._drafter = drafter
        self._stopwatch = stopwatch
        self._target = target
        # Without the ends of the vocabulary, where special tokens are.
        self._rng = random.Random(0)
        self._vocab = range(vocab_size // 8, vocab_size - vocab_size // 8)
        self._context_len = min(CONTEXT_LEN, max_context_len - _MAX_NEW - max(DRAFT_LENS))
        self._catch_up_lens = [n for n in CATCH_UP_LENS if self._context_len + n + 1 <= max_context_len]
        self._texts: dict[str, tuple[int, ...]] = {}
        self._committed_lens: dict[str, int] = {}

    def draft_grid(self, max_batch: int, max_draft_len: int) -> list[tuple[int, int]]:
        lens = sorted({length for length in DRAFT_LENS if length < max_draft_len} | {max_draft_len})
        return [(batch, length) for batch in BATCHES if batch <= max_batch for length in lens]

    def catch_up_grid(self) -> list[tuple[int, int]]:
        return [(num, 0) for num in self._catch_up_lens]

    def draft(self, batch: int, draft_len: int) -> float:
        """Seconds of a batch of drafts."""
        names = [key_of(0, f"probe-draft-{i}") for i in range(batch)]
        for name in names:
            if name not in self._committed_lens or self._committed_lens[name] + 1 > len(self._texts[name]):
                self._start(name, self._context_len, _MAX_NEW)
                self._propose([name], 1)
            self._commit(name, 1)
        return self._propose(names, draft_len)

    def catch_up(self, num_tokens: int, _: int = 0) -> float:
        """Seconds of a draft of one token after ``num_tokens`` new committed ones."""
        name = key_of(0, "probe-news")
        self._start(name, self._context_len, num_tokens)
        self._propose([name], 1)
        self._commit(name, num_tokens)
        return self._propose([name], 1)

    def close(self) -> None:
        for name in self._texts:
            self._drafter.release(name)
            if self._target is not None:
                self._target.drop(request_id_of(name))
        self._texts.clear()
        self._committed_lens.clear()

    def _start(self, name: str, context_len: int, num_new: int) -> None:
        period = self._rng.choices(self._vocab, k=PERIOD)
        length = context_len + num_new
        text = tuple((period * (length // PERIOD + 1))[:length])
        if self._target is not None:  # of n committed tokens it has computed n - 1, so it holds one token more
            self._target.hold(request_id_of(name), (*text, text[0]))
        self._drafter.open(name, text[:context_len], context_len, _SAMPLING)
        self._texts[name], self._committed_lens[name] = text, context_len

    def _commit(self, name: str, num_tokens: int) -> None:
        committed_len = self._committed_lens[name]
        self._drafter.extend(name, self._texts[name][committed_len : committed_len + num_tokens])
        self._committed_lens[name] = committed_len + num_tokens

    def _propose(self, names: list[str], draft_len: int) -> float:
        demands = [Demand(name, draft_len) for name in names]
        self._stopwatch.start()
        self._drafter.propose(demands)
        return self._stopwatch.stop()
