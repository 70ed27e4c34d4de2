"""Measures a profile: the target and drafters of a configuration in one process."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import torch

from cluster.config import Config, DrafterOptions, HiddenStateOptions, LayersOptions, TableOptions, VllmOptions
from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from drafters.draft_timing import DrafterProbe
from drafters.hidden_states.host import Host
from drafters.registry import Site, feature_layers, make
from engine.loading import identity_of, load_engine
from engine.models.prepare import ensure_model
from engine.partition import Split
from engine.target import LoadedTarget, TargetEngine, compute
from engine.target_probe import TargetProbe
from profiler.interleaved import OwnTime, Timing, TimingBudget, time_interleaved
from profiler.latency import MIN_POINTS, Kind
from profiler.profile import WHOLE_DEVICE, DrafterProfile, Part, Profile, Surface, parts_of_drafter

Reporter = Callable[[str, float], None]  # step, share done


@dataclass(frozen=True, slots=True)
class ProfileEffort:
    """The extent of the measurements."""

    passes: TimingBudget
    max_rows: int | None  # of a pass; None: the target's maximum
    max_batch: int  # of drafts

    @classmethod
    def of(cls, quick: bool) -> "ProfileEffort":
        return _QUICK if quick else _FULL


_QUICK = ProfileEffort(TimingBudget(min_visits=4, budget_s=90.0, precision=0.03), max_rows=256, max_batch=16)
_FULL = ProfileEffort(TimingBudget(min_visits=9, budget_s=420.0), max_rows=None, max_batch=64)
_COLOCATED_BATCH = 16  # their contexts share the target's KV cache with the measured passes


def measure_profile(
    config: Config, effort: ProfileEffort, report: Reporter = lambda step, share: None, split: Split | None = None
) -> Profile:
    """Measures the target and drafters of a resolved configuration. In a ``split``: the target in its lane, and the drafters
    in its process in theirs; the calling thread stays there.

    Takes the time budget of ``effort``, or longer if its minimum of measurements does. Raises OutriderError: a model is
    missing, does not fit, or is too small to be measured.
    """
    report("loading", 0.0)
    colocated = [drafter for drafter in config.drafters if drafter.is_colocated]
    folder = ensure_model(config.model.name, engine=config.target.engine)
    engine, model = load_engine(config, feature_layers(colocated, folder))
    bench = _ProfileBench(config, engine, model, split)
    every = [part for drafter in config.drafters for part in parts_of_drafter(drafter, bench.threads)]
    parts = {part.key: part for part in every if not isinstance(part.options, VllmOptions)}  # drafts after real passes alone
    if split is not None:
        parts = {key: part for key, part in parts.items() if part.colocated}
    for part in parts.values():
        bench.add_drafter(part, effort.max_batch)
    bench.add_target(effort.max_rows)
    timings = bench.time(effort.passes, partial(report, "passes and drafts"))
    return Profile(
        identity=identity_of(config, WHOLE_DEVICE if split is None else split.name),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        step=Surface.of(Kind.PASS, timings["step"]),
        prefill=Surface.of(Kind.PASS, timings["prefill"]),
        drafters={key: _drafter(part, timings) for key, part in parts.items()},
    )


def _drafter(part: Part, timings: Mapping[str, Mapping[tuple[int, int], Timing]]) -> DrafterProfile:
    draft, catch_up = timings[f"draft {part.key}"], timings.get(f"catch-up {part.key}")
    surface = None if catch_up is None else Surface.of(Kind.CATCH_UP, catch_up)
    return DrafterProfile(label=part.label, draft=Surface.of(Kind.DRAFT, draft), catch_up=surface)


class _ProfileBench:
    """The timed work, by surface and point."""

    def __init__(self, config: Config, engine: LoadedTarget, model: ModelInfo, split: Split | None) -> None:
        self._split = split
        threads = config.target.resources.threads
        self.threads = torch.get_num_threads() if threads == "auto" else threads
        self._config, self._engine, self._model = config, engine, model
        self._host = Host(engine, ensure_model(config.model.name, engine=config.target.engine))
        self._works: dict[tuple[str, int, int], Callable[[], float]] = {}
        self._probes: list[DrafterProbe] = []

    def add_target(self, max_rows: int | None) -> None:
        probe = TargetProbe(self._engine, OwnTime(), max_rows)
        self._add("step", probe.pass_grid(), probe.step, self.threads)
        self._add("prefill", probe.prefill_grid(), probe.prefill, self.threads)

    def add_drafter(self, part: Part, max_batch: int) -> None:
        site = Site(self._model, part.device, self._host if part.colocated else None)
        drafter = make(_without_early_stop(part.options), site)
        reads = part.options.traits.reads_hidden_states
        backing = _TargetBacking(self._engine) if reads else None
        probe = DrafterProbe(drafter, self._model.vocab_size, OwnTime(), backing, self._model.max_model_len)
        self._probes.append(probe)
        batch = min(max_batch, _COLOCATED_BATCH) if reads else max_batch
        self._add(f"draft {part.key}", probe.draft_grid(batch, part.draft_len), probe.draft, part.threads)
        if part.options.traits.has_model and len(grid := probe.catch_up_grid()) >= MIN_POINTS:
            self._add(f"catch-up {part.key}", grid, probe.catch_up, part.threads)

    def time(self, effort: TimingBudget, report: Callable[[float], None]) -> dict[str, dict[tuple[int, int], Timing]]:
        before = torch.get_num_threads()
        try:
            found = time_interleaved(self._works, effort, time.perf_counter, report)
        finally:
            torch.set_num_threads(before)
            for probe in self._probes:
                probe.close()
        timings: dict[str, dict[tuple[int, int], Timing]] = {}
        for (surface, x, y), timing in found.items():
            timings.setdefault(surface, {})[x, y] = timing
        return timings

    def _add(self, surface: str, grid: Sequence[tuple[int, int]], work: Callable[[int, int], float], threads: int) -> None:
        if len(grid) < MIN_POINTS:
            longest, rows = self._model.max_model_len, self._engine.capacity().max_pass_tokens
            raise InvalidField("target.max_pass_tokens", rows, f"with length {longest} leaves too few points to measure")
        enter: Callable[[], None] = partial(torch.set_num_threads, threads)
        if self._split is not None:
            enter = (self._split.target if surface in ("step", "prefill") else self._split.drafter).enter
        for x, y in grid:
            self._works[surface, x, y] = partial(_within, enter, work, x, y)


def _within(enter: Callable[[], None], work: Callable[[int, int], float], x: int, y: int) -> float:
    enter()
    return work(x, y)


def _without_early_stop(options: DrafterOptions) -> DrafterOptions:
    """Drafts of full length: the cost of a token is measured whatever its confidence."""
    if isinstance(options, LayersOptions | HiddenStateOptions):
        return options.model_copy(update={"min_survival": 0.0})
    if isinstance(options, TableOptions):
        return options.model_copy(update={"min_confidence": 0.0})
    return options


class _TargetBacking:
    """``drafters.draft_timing.ProbeTarget`` of sequences computed by the target."""

    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine

    def hold(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        self._engine.release(request_id)
        request = Request(request_id, token_ids, SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
        compute(self._engine, request, token_ids, len(token_ids))

    def drop(self, request_id: str) -> None:
        self._engine.release(request_id)
