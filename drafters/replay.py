"""What a drafter would have got accepted, held against recorded outputs of the target.

The output does not depend on the drafting (DESIGN idea 1), so this is exact, and needs no pass of the target.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.types import SamplingParams
from drafters.protocol import Demand, Drafter


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer of the target. The drafter is told ``sampling``, seed included."""

    name: str
    domain: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """One verification of the whole draft."""

    domain: str
    confidences: tuple[float, ...]  # of the draft
    num_accepted: int
    num_committed: int  # with the bonus token; less at the end of an answer


class Behind(Protocol):
    """The target behind a replay, for drafters that read its hidden states."""

    def hold(self, recording: Recording) -> None:
        """Compute all of an answer."""

    def drop(self, recording: Recording) -> None: ...


@dataclass(slots=True)
class _Replayed:
    recording: Recording
    num_done: int = 1  # output tokens committed: the first comes with the prompt's own pass

    @property
    def num_left(self) -> int:
        return len(self.recording.output_token_ids) - self.num_done


def replay(
    drafter: Drafter, recordings: Sequence[Recording], draft_len: int, batch: int = 16, behind: Behind | None = None
) -> Iterator[Round]:
    """Serves the recordings in their order, ``batch`` at once, every draft of up to ``draft_len`` tokens verified whole."""
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
            live.append(_Replayed(recording))
        # The last token of an answer is the target's own and needs no draft.
        demands = [Demand(r.recording.name, min(draft_len, r.num_left - 1)) for r in live]
        for replayed, draft in zip(live, drafter.propose(demands), strict=True):
            recording = replayed.recording
            truth = recording.output_token_ids[replayed.num_done :]
            num_accepted = common_prefix_len(draft.token_ids, truth)
            num_committed = min(num_accepted + 1, len(truth))
            replayed.num_done += num_committed
            drafter.extend(recording.name, truth[:num_committed])
            if not replayed.num_left:
                drafter.release(recording.name)
                if behind is not None:
                    behind.drop(recording)
            yield Round(recording.domain, draft.confidences, num_accepted, num_committed)
        live = [replayed for replayed in live if replayed.num_left]


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
