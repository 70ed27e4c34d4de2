"""Accepted lengths of a drafter on recorded outputs of the target: exact, and without its passes."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.sampling_params import SamplingParams
from drafters.protocol import Demand, Drafter
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


def replay(
    drafter: Drafter, recordings: Sequence[Recording], draft_len: int, batch: int = 16, behind: ReplayTarget | None = None
) -> Iterator[Round]:
    """Replays the recordings in order, ``batch`` at once; every draft of up to ``draft_len`` tokens is verified whole."""
    waiting = deque(recording for recording in recordings if len(recording.output_token_ids) > 1)
    live: list[tuple[Recording, int]] = []  # with the committed tokens; the first comes with the prompt's own pass
    while waiting or live:
        while waiting and len(live) < batch:
            recording = waiting.popleft()
            prompt = recording.prompt_token_ids
            if behind is not None:
                behind.hold(recording)
            drafter.open(recording.name, prompt, len(prompt), recording.sampling)
            drafter.extend(recording.name, recording.output_token_ids[:1])
            live.append((recording, 1))
        demands = [Demand(r.name, min(draft_len, len(r.output_token_ids) - position - 1)) for r, position in live]
        drafts, batched, live = drafter.propose(demands), live, []
        for (recording, position), draft in zip(batched, drafts, strict=True):
            rest = recording.output_token_ids[position:]
            num_accepted = common_prefix_len(draft.token_ids, rest)
            num_committed = min(num_accepted + 1, len(rest))
            drafter.extend(recording.name, rest[:num_committed])
            if num_committed < len(rest):
                live.append((recording, position + num_committed))
            else:
                drafter.release(recording.name)
                if behind is not None:
                    behind.drop(recording)
            yield Round(recording.domain, draft.confidences, num_accepted, num_committed)
