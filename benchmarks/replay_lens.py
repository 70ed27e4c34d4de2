"""Replays of one drafter at several draft lengths in one walk."""

from collections import deque
from collections.abc import Iterator, Sequence

from drafters.protocol import Demand, Draft, Drafter
from drafters.replay import Recording, Round
from engine.acceptance import common_prefix_len


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


def replay_lens(
    drafter: Drafter,
    recordings: Sequence[Recording],
    draft_lens: Sequence[int],
    batch: int = 16,
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
            yield from rounds
        live = [replayed for replayed in live if replayed.num_left]
