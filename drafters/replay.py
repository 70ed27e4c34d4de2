"""Accepted lengths of a drafter on recorded outputs of the target.

The output does not depend on drafting (DESIGN idea 1), so this is exact and needs no pass of the target.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.types import SamplingParams
from drafters.protocol import Demand, Draft, Drafter
from engine.acceptance import common_prefix_len


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer of the target. The drafter gets ``sampling``, seed included."""

    name: str
    domain: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """One verification of a whole draft."""

    domain: str
    confidences: tuple[float, ...]  # of the draft
    num_accepted: int
    num_committed: int  # with the bonus token; less at the end of an answer


class ReplayTarget(Protocol):
    """The target of a replay, for drafters that read its hidden states."""

    def hold(self, recording: Recording) -> None:
        """Computes a whole answer."""

    def drop(self, recording: Recording) -> None: ...


class _Replayed:
    """An answer, with the committed tokens for each draft length."""

    def __init__(self, recording: Recording, draft_lens: Sequence[int]) -> None:
        self.recording = recording
        self.num_done = dict.fromkeys(draft_lens, 1)  # the first comes with the prompt's own pass

    @property
    def position(self) -> int:
        """The drafter's position: the least committed length over all draft lengths."""
        return min(self.num_done.values())

    @property
    def num_left(self) -> int:
        return len(self.recording.output_token_ids) - self.position

    def wanted(self, draft_len: int) -> int:
        """Tokens of the next draft; the last token of an answer needs none."""
        return min(draft_len, self.num_left - 1)

    def rounds(self, draft: Draft) -> Iterator[tuple[int, Round]]:
        """Verifies the draft for each draft length at this position."""
        truth = self.recording.output_token_ids[self.position :]
        here = [draft_len for draft_len, num_done in self.num_done.items() if num_done == self.position]
        for draft_len in here:
            num_drafted = self.wanted(draft_len)
            num_accepted = common_prefix_len(draft.token_ids[:num_drafted], truth)
            num_committed = min(num_accepted + 1, len(truth))
            yield draft_len, Round(self.recording.domain, draft.confidences[:num_drafted], num_accepted, num_committed)

    def commit(self, rounds: Sequence[tuple[int, Round]]) -> tuple[int, ...]:
        """Returns the tokens now committed for all draft lengths."""
        before = self.position
        for draft_len, round_ in rounds:
            self.num_done[draft_len] += round_.num_committed
        return self.recording.output_token_ids[before : self.position]


def replay(
    drafter: Drafter, recordings: Sequence[Recording], draft_len: int, batch: int = 16, behind: ReplayTarget | None = None
) -> Iterator[Round]:
    """Replays the recordings in order, ``batch`` at once; every draft of up to ``draft_len`` tokens is verified whole."""
    return (round_ for _, round_ in replay_lens(drafter, recordings, (draft_len,), batch, behind))


def replay_lens(
    drafter: Drafter,
    recordings: Sequence[Recording],
    draft_lens: Sequence[int],
    batch: int = 16,
    behind: ReplayTarget | None = None,
) -> Iterator[tuple[int, Round]]:
    """Several replays in one: rounds with their draft length. The drafter is queried once at each position where a draft
    of any length begins.

    Exact for a drafter whose shorter drafts are prefixes of its longer ones and that learns nothing from verification.
    Others need one replay per length.
    """
    waiting = deque(recording for recording in recordings if len(recording.output_token_ids) > 1)
    live: list[_Replayed] = []
    while waiting or live:
        while waiting and len(live) < batch:
            recording = waiting.popleft()
            prompt = recording.prompt_token_ids
            if behind is not None:
                behind.hold(recording)
            drafter.open(recording.name, prompt, len(prompt), recording.sampling)
            drafter.extend(recording.name, recording.output_token_ids[:1])
            live.append(_Replayed(recording, draft_lens))
        demands = [
            Demand(r.recording.name, max(r.wanted(n) for n, num_done in r.num_done.items() if num_done == r.position))
            for r in live
        ]
        for replayed, draft in zip(live, drafter.propose(demands), strict=True):
            recording = replayed.recording
            rounds = list(replayed.rounds(draft))
            drafter.extend(recording.name, replayed.commit(rounds))
            if not replayed.num_left:
                drafter.release(recording.name)
                if behind is not None:
                    behind.drop(recording)
            yield from rounds
        live = [replayed for replayed in live if replayed.num_left]
