"""Bias of counterfactual scores: accepted length by scores over accepted length when driving.

Each drafter is scored while another drives the requests, as the router sees it; then it drives the same requests
itself. The control begins every virtual round where the driver's rounds begin.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.fixtures import Fixtures
from benchmarks.pool import pool
from benchmarks.prompts import choose_prompts
from benchmarks.report import BenchOptions, Cell, Table
from cluster.config import DrafterConfig
from drafters.counterfactual import Shadow, score_shadows
from drafters.protocol import Demand, Drafter
from drafters.replay import Recording, replay
from engine.acceptance import common_prefix_len

NUM_PROMPTS, NUM_QUICK = 60, 20
NUM_NEW_TOKENS = 128
DRAFT_LEN = 7
DRIVERS = ("table", "ngram")  # the first other than the scored one
COMBINATIONS = ("cascade",)


@dataclass(slots=True)
class _Lengths:
    """Accepted lengths of rounds, bonus token included."""

    driving: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    at_drivers_rounds: list[int] = field(default_factory=list)


def run(options: BenchOptions) -> tuple[dict[str, float], Table]:
    """Figures ``score_bias.<drafter>``, of answers at temperature 0."""
    configs = [config for config in pool(options.model) if config.options.kind not in COMBINATIONS]
    fixtures = Fixtures(options.model, configs, NUM_NEW_TOKENS)
    prompts = choose_prompts(options.prompts or options.data_prompts, NUM_QUICK if options.quick else NUM_PROMPTS)
    by_name = {config.name: config for config in configs}
    lengths = {config.name: _Lengths() for config in configs}
    # Each arm has its own drafter, which sees the requests in the same order, since drafters learn from them.
    arms = {name: tuple(fixtures.make(config) for _ in range(3)) for name, config in by_name.items()}
    driving = {name: fixtures.make(by_name[name]) for name in DRIVERS}
    for answers in fixtures.record(prompts, (0.0,)):
        part = [answer for answer in answers[0.0] if len(answer.output_token_ids) > 2]
        with fixtures.holding(part):
            for answer in part:
                commits = {name: _drive(drafter, answer) for name, drafter in driving.items()}
                for name, (driver, scored, control) in arms.items():
                    lengths[name].driving += _drafted(_drive(driver, answer), answer)
                    followed = commits[_driver_of(name)]
                    lengths[name].scored += _follow(scored, answer, followed)
                    lengths[name].at_drivers_rounds += _begin_with_driver(control, answer, followed)
    return _result(configs, lengths)


def _driver_of(name: str) -> str:
    return next(driver for driver in DRIVERS if driver != name)


def _drive(drafter: Drafter, answer: Recording) -> list[int]:
    """Tokens committed by each round after the prompt's pass."""
    return [round_.num_committed for round_ in replay(drafter, [answer], DRAFT_LEN)]


def _drafted(commits: Sequence[int], answer: Recording) -> list[int]:
    """Rounds that had a draft: the last token alone has none."""
    ends_alone = sum(commits[:-1]) == len(answer.output_token_ids) - 2
    return list(commits[:-1] if ends_alone else commits)


def _follow(drafter: Drafter, answer: Recording, commits: Sequence[int]) -> list[int]:
    """Scores of a request that another drafter drives."""
    prompt, output = answer.prompt_token_ids, answer.output_token_ids
    drafter.open(answer.name, prompt, len(prompt), answer.sampling)
    drafter.extend(answer.name, output[:1])
    shadow = Shadow(answer.name, answer.name, len(prompt) + 1, DRAFT_LEN, len(prompt) + len(output))
    found, done = [], 1
    for num_tokens in commits:
        shadow.commit(output[done : done + num_tokens])
        done += num_tokens
        while shadow.pending:
            found += [score.num_matched + 1 for _, score in score_shadows(drafter, [shadow])]
    drafter.release(answer.name)
    return found


def _begin_with_driver(drafter: Drafter, answer: Recording, commits: Sequence[int]) -> list[int]:
    """The control: a draft at every round of the driver."""
    prompt, output = answer.prompt_token_ids, answer.output_token_ids
    drafter.open(answer.name, prompt, len(prompt), answer.sampling)
    drafter.extend(answer.name, output[:1])
    found, done = [], 1
    for num_tokens in commits:
        num_wanted = min(DRAFT_LEN, len(output) - done - 1)
        if num_wanted:
            (draft,) = drafter.propose([Demand(answer.name, num_wanted)])
            found.append(common_prefix_len(draft.token_ids[:num_wanted], output[done:]) + 1)
        drafter.extend(answer.name, output[done : done + num_tokens])
        done += num_tokens
    drafter.release(answer.name)
    return found


def _result(configs: Sequence[DrafterConfig], lengths: dict[str, _Lengths]) -> tuple[dict[str, float], Table]:
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    for config in configs:
        of = lengths[config.name]
        driving = statistics.fmean(of.driving)
        scored, control = statistics.fmean(of.scored), statistics.fmean(of.at_drivers_rounds)
        figures[f"score_bias.{config.name}"] = scored / driving
        rows.append((config.name, _driver_of(config.name), driving, scored, scored / driving, control / driving))
    columns = ("drafter", "driven by", "driving", "scored", "score_bias", "control: at the driver's rounds")
    return figures, Table("accepted length, driving and scored", columns, tuple(rows))
