"""Accepted lengths of each drafter of a pool on recorded answers: exact, and on the same answers for all."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.fixtures import MAX_BATCH, Fixtures
from benchmarks.prompts import BenchPrompt
from cluster.config import DrafterConfig
from drafters.replay import Recording, Round, replay

Key = tuple[str, float, int]  # drafter, temperature, draft length


def accepted(
    fixtures: Fixtures,
    configs: Sequence[DrafterConfig],
    prompts: Sequence[BenchPrompt],
    draft_lens: Sequence[int],
    temperatures: Sequence[float],
    tell: Callable[[str], None],
) -> tuple[Mapping[Key, list[Round]], Mapping[float, list[Recording]]]:
    """The rounds of all drafters, and the answers that they were replayed on.

    Answers are recorded in parts, and every drafter is replayed on a part while the target's cache still holds it. A drafter
    has one instance per temperature and draft length, which sees all parts: most learn.
    """
    drafters = {(config.name, t, n): fixtures.make(config) for config in configs for t in temperatures for n in draft_lens}
    rounds: dict[Key, list[Round]] = {key: [] for key in drafters}
    recordings: dict[float, list[Recording]] = {t: [] for t in temperatures}
    for number, part in enumerate(fixtures.record(prompts, temperatures)):
        tell(f"answers {number * MAX_BATCH + 1} to {min(len(prompts), (number + 1) * MAX_BATCH)} of {len(prompts)}")
        for temperature, answers in part.items():
            recordings[temperature].extend(answers)
            with fixtures.holding(answers):
                for key, drafter in drafters.items():
                    if key[1] == temperature:
                        rounds[key] += replay(drafter, answers, key[2], batch=MAX_BATCH)
    return rounds, recordings
