"""Accepted lengths of each drafter of a pool on recorded answers: exact, and on the same answers for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.fixtures import MAX_BATCH, Fixtures
from benchmarks.prompts import BenchPrompt
from benchmarks.replay_lens import replay_lens
from cluster.config import DrafterConfig, HiddenStateOptions, LayersOptions, ModelOptions
from drafters.protocol import Drafter
from drafters.replay import Recording, Round

Key = tuple[str, float, int]  # drafter, temperature, draft length


@dataclass(frozen=True, slots=True)
class _Contender:
    name: str
    draft_lens: tuple[int, ...]  # replayed together
    drafter: Drafter


def learns(config: DrafterConfig) -> bool:
    """Whether its drafts or confidences depend on earlier demands and verifications.

    Other drafters propose a prefix of their longer draft when a shorter one is demanded.
    """
    return not isinstance(config.options, ModelOptions | LayersOptions | HiddenStateOptions)


def accepted(
    fixtures: Fixtures,
    configs: Sequence[DrafterConfig],
    prompts: Sequence[BenchPrompt],
    draft_lens: Sequence[int],
    temperatures: Sequence[float],
    tell: Callable[[str], None],
) -> tuple[Mapping[Key, list[Round]], Mapping[float, list[Recording]]]:
    """The rounds of all drafters, and the answers that they were replayed on.

    Answers are recorded in parts, and every drafter is replayed on a part while the target's cache still holds it. A
    drafter that learns has one instance per temperature and draft length, which sees all parts.
    """
    contenders = {t: _contenders(fixtures, configs, draft_lens) for t in temperatures}
    rounds: dict[Key, list[Round]] = {(c.name, t, n): [] for c in configs for t in temperatures for n in draft_lens}
    recordings: dict[float, list[Recording]] = {t: [] for t in temperatures}
    for number, part in enumerate(fixtures.record(prompts, temperatures)):
        tell(f"answers {number * MAX_BATCH + 1} to {min(len(prompts), (number + 1) * MAX_BATCH)} of {len(prompts)}")
        for temperature, answers in part.items():
            recordings[temperature].extend(answers)
            with fixtures.holding(answers):
                for one in contenders[temperature]:
                    for draft_len, round_ in replay_lens(one.drafter, answers, one.draft_lens, batch=MAX_BATCH):
                        rounds[one.name, temperature, draft_len].append(round_)
    return rounds, recordings


def _contenders(fixtures: Fixtures, configs: Sequence[DrafterConfig], draft_lens: Sequence[int]) -> list[_Contender]:
    return [
        _Contender(config.name, lens, fixtures.make(config))
        for config in configs
        for lens in ([(n,) for n in draft_lens] if learns(config) else [tuple(draft_lens)])
    ]
