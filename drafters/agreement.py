"""What a drafter would propose at every position of recorded answers, and how much of it is right."""

from collections.abc import Sequence

from drafters.protocol import Demand, Drafter
from drafters.replay import Recording, common_prefix_len

Told = list[tuple[int, tuple[float, ...]]]  # by position: right tokens of the draft, and the confidences of all


def agreement(drafter: Drafter, recordings: Sequence[Recording], draft_len: int) -> list[Told]:
    """Agreement with each recording. All are served together and committed token by token, so a draft begins at each
    position.

    A learning drafter thus learns from drafts at every position, not only from those of rounds.
    """
    found: list[Told] = [[] for _ in recordings]
    for recording in recordings:
        drafter.open(recording.name, recording.prompt_token_ids, len(recording.prompt_token_ids), recording.sampling)
    live = [number for number, recording in enumerate(recordings) if recording.output_token_ids]
    position = 0
    while live:
        drafts = drafter.propose([Demand(recordings[number].name, draft_len) for number in live])
        for number, draft in zip(live, drafts, strict=True):
            recording = recordings[number]
            num_right = common_prefix_len(draft.token_ids, recording.output_token_ids[position:])
            found[number].append((num_right, draft.confidences))
            drafter.extend(recording.name, recording.output_token_ids[position : position + 1])
        position += 1
        for number in live:
            if len(recordings[number].output_token_ids) == position:
                drafter.release(recordings[number].name)
        live = [number for number in live if len(recordings[number].output_token_ids) > position]
    return found
