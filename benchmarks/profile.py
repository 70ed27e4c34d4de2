"""``outrider bench profile``: prediction errors of a profile for pass and draft times at held-out points.

Measures what ``outrider profile`` measures, with as many threads as the process has, and stores nothing. A fifth of the
points is held out (FASER, section 6.3.1), each point once; errors are mean absolute percentage errors. ``mape.drafter``
is the mean over drafters.
"""

import statistics

from rich.console import Console

from benchmarks.pool import pool
from benchmarks.report import BenchOptions, BenchResult, Table, describe_environment
from cluster.config import Config, DrafterConfig, ModelConfig, ModelOptions, Resources, TargetConfig
from cluster.resolve import resolve
from deploy.profile_command import row, surfaces
from deploy.profiling import ProfileEffort, measure_profile
from profiler.hardware import here
from profiler.latency import FORMS
from profiler.profile import Profile

_TRUNCATED_LAYERS = 2


def run(options: BenchOptions) -> BenchResult:
    console = Console(stderr=True)
    threads = describe_environment().num_threads
    config = resolve(
        Config(
            model=ModelConfig(name=options.model),
            target=TargetConfig(resources=Resources(threads=threads)),
            drafters=drafters(options.model),
        ),
        here(),
    )
    console.print(f"profile: measuring the target and {len(config.drafters)} drafters", highlight=False)
    return result(measure_profile(config, ProfileEffort.of(options.quick)))


def drafters(model: str) -> tuple[DrafterConfig, ...]:
    """The available drafters; without shipped ones, a model drafter stands for the trained ones."""
    known = tuple(drafter for drafter in pool(model) if drafter.options.kind != "cascade")
    if any(drafter.options.traits.has_model for drafter in known):
        return known
    truncated = ModelOptions(model=model, num_layers=_TRUNCATED_LAYERS)
    return (*known, DrafterConfig(name="truncated", options=truncated))


def result(profile: Profile) -> BenchResult:
    found = surfaces(profile)
    drafts = [drafter.draft for drafter in profile.drafters.values()]
    figures = {
        "mape.target": profile.step.held_out_mape,
        "mape.prefill": profile.prefill.held_out_mape,
        "mape.drafter": statistics.fmean(draft.held_out_mape for draft in drafts),
        "spread.target": statistics.median(sample.spread for sample in profile.step.samples),
        "spread.drafter": statistics.median(sample.spread for draft in drafts for sample in draft.samples),
    }
    for form in FORMS:
        figures[f"mape.target.{form}"] = profile.step.mape[form]
        figures[f"mape.drafter.{form}"] = statistics.fmean(draft.mape[form] for draft in drafts)
    one_row_s = profile.step.fit.at(1, 0)
    for drafter in profile.drafters.values():
        figures[f"mape.drafter.{drafter.label}"] = drafter.draft.held_out_mape
        figures[f"draft_over_step.{drafter.label}"] = drafter.draft.fit.at(1, 8) / one_row_s
    columns = ("what", "points", "least ms", "most ms", "spread", *(f"error {form}" for form in FORMS), "chosen")
    return BenchResult(
        "profile",
        figures,
        tables=(Table("what was measured", columns, tuple((name, *row(one)) for name, one in found.items())),),
        notes=(
            "errors on held-out points; spread: interquartile range over the median, of the median point.",
            "draft_over_step: 8 tokens for one request over a one-row pass.",
        ),
    )
