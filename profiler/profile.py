"""A profile: measurements of a target and its drafters on some hardware, the fits, and the cost model made of them."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from cluster.config import CascadeOptions, Config, Count, DrafterConfig, DrafterOptions, Section, VllmOptions
from cluster.errors import OutriderError
from cluster.state import StateConflict, StateStore, StateUnavailable
from profiler.interleaved import Timing
from profiler.latency import FORMS, Form, Kind, LatencyPoint, Seconds, compare
from router.assignment import drafter_of
from router.cost_model import CostModel, TableCost, relative_draft_cost

FORMAT = 2  # of a Profile as JSON; 1 had drafters by options of which some are no options any more
PREFIX = "profile"
_LEAST_S = 1e-6  # of a pass: a profile's coefficients may all be 0, and rates are made of times
WHOLE_DEVICE = "whole"  # else the name of an `engine.partition.Split`
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileRefused(OutriderError):
    """A stored profile is damaged, of another format, or of other hardware."""


class Identity(Section):
    """The configuration and hardware that a profile holds for."""

    engine: str
    model: str
    dtype: str
    device: str
    hardware: str  # name of the CPU or GPU
    threads: Count
    parallelism: Count  # ranks
    partition: str = WHOLE_DEVICE

    @classmethod
    def of(cls, config: Config, hardware: str, partition: str = WHOLE_DEVICE) -> Self:
        """Of the target of a resolved configuration."""
        target, threads = config.target, config.target.resources.threads
        return cls(
            engine="native" if target.engine == "auto" else target.engine,
            model=config.model.name.rstrip("/"),
            dtype=target.dtype,
            device=target.device,
            hardware=hardware,
            threads=1 if threads == "auto" else threads,
            parallelism=target.tensor_parallel,
            partition=partition,
        )

    @property
    def key(self) -> str:
        """Key in a StateStore: a readable prefix and a digest."""
        model = re.sub(r"[^a-z0-9._-]+", "-", self.model.rsplit("/", 1)[-1].lower())[:32]
        return f"{PREFIX}/{model}/{self.dtype}/{self.device}/{_digest(self.model_dump(mode='json'))}"


class Sample(Section):
    x: Annotated[int, Field(ge=0)]
    y: Annotated[int, Field(ge=0)]
    seconds: Seconds
    spread: Share  # interquartile range over the median
    num: Count


class Surface(Section):
    """Measured points, the error of each form on held-out points, and the best form fitted to all points."""

    kind: Kind
    samples: tuple[Sample, ...]
    mape: Mapping[str, Share]  # on held-out points, by form
    fit: Form

    @classmethod
    def of(cls, kind: Kind, timings: Mapping[tuple[int, int], Timing]) -> Self:
        """Raises ValueError with too few points."""
        found = compare(kind, [LatencyPoint(x, y, timing.seconds) for (x, y), timing in timings.items()])
        samples = tuple(
            Sample(x=x, y=y, seconds=timing.seconds, spread=timing.spread, num=timing.num)
            for (x, y), timing in sorted(timings.items())
        )
        return cls(kind=kind, samples=samples, mape=found.held_out, fit=found.fits[found.best])

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if set(self.mape) != set(FORMS):
            raise ValueError(f"mape must name the forms {', '.join(FORMS)}, got {', '.join(self.mape)}")
        return self

    @property
    def points(self) -> list[LatencyPoint]:
        return [LatencyPoint(sample.x, sample.y, sample.seconds) for sample in self.samples]

    @property
    def held_out_mape(self) -> float:
        return self.mape[self.fit.form]


class DrafterProfile(Section):
    """One drafter of the pool or of a cascade."""

    label: str
    draft: Surface
    catch_up: Surface | None = None  # a draft of one token with so many new committed ones; None: free


class Profile(Section):
    """``drafters`` by ``Part.key``."""

    format: Literal[2] = 2
    identity: Identity
    measured_at: str  # ISO 8601
    step: Surface
    prefill: Surface
    drafters: Mapping[str, DrafterProfile] = {}

    def to_json(self) -> JsonValue:
        value: JsonValue = self.model_dump(mode="json")
        return value

    def supplemented(self, older: "Profile") -> "Profile":
        """Adds the drafters that only ``older`` has."""
        return self.model_copy(update={"drafters": {**older.drafters, **self.drafters}})

    def unmatched(self, config: Config) -> list[str]:
        """Drafters of a resolved configuration that were not measured with their options, but could be."""
        return [
            drafter.name
            for drafter in config.drafters
            for part in parts_of_drafter(drafter, self.identity.threads)
            if part.key not in self.drafters and not isinstance(part.options, VllmOptions)
        ]


def read_profile(value: JsonValue, identity: Identity) -> Profile:
    """Raises ProfileRefused unless it is a valid profile of ``identity``."""
    # Profiles of earlier versions also hold round trips of links.
    known = {name: part for name, part in value.items() if name != "transport"} if isinstance(value, dict) else {}
    if (found := known.get("format")) != FORMAT:
        raise ProfileRefused(f"its format is {found!r}, this version reads {FORMAT}")
    try:
        profile = Profile.model_validate_json(json.dumps(known))
    except ValidationError as error:
        first = error.errors()[0]
        raise ProfileRefused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if profile.identity != identity:
        mine, its = identity.model_dump(), profile.identity.model_dump()
        differs = ", ".join(f"{name} {its[name]!r} instead of {mine[name]!r}" for name in mine if mine[name] != its[name])
        raise ProfileRefused(f"it was measured elsewhere: {differs}")
    return profile


@dataclass(frozen=True, slots=True)
class Part:
    """A drafter as it is measured. A cascade is measured member by member."""

    label: str
    options: DrafterOptions
    device: str
    threads: int
    colocated: bool
    draft_len: int

    @property
    def key(self) -> str:
        """Independent of names: the same drafter on the same share of a machine has the same key."""
        place: list[JsonValue] = [self.device, self.threads] if self.options.traits.has_model else []
        return f"{self.options.kind}-{_digest([self.options.model_dump(mode='json'), place])}"


def parts_of_drafter(drafter: DrafterConfig, target_threads: int) -> Iterator[Part]:
    """A drafter of a resolved configuration itself, or the members of a cascade."""
    threads = drafter.resources.threads
    own = target_threads if drafter.is_colocated or threads == "auto" else threads
    yield from _parts(drafter.options, drafter.name, drafter, own)


def _parts(options: DrafterOptions, label: str, drafter: DrafterConfig, threads: int) -> Iterator[Part]:
    if isinstance(options, CascadeOptions):
        for i, member in enumerate(options.members):
            yield from _parts(member, f"{label}.{i}-{member.kind}", drafter, threads)
        return
    yield Part(label, options, drafter.device, threads, drafter.is_colocated, drafter.max_draft_len)


class ProfiledCost:
    """``router.cost_model.CostModel`` of a profile, for the drafters of a resolved configuration.

    A cascade costs as much as its most expensive member, and is unknown unless all are profiled.
    """

    def __init__(self, profile: Profile, config: Config) -> None:
        self._step, self._prefill = profile.step.fit, profile.prefill.fit
        self._drafters: dict[str, list[DrafterProfile]] = {}
        for drafter in config.drafters:
            keys = [part.key for part in parts_of_drafter(drafter, profile.identity.threads)]
            if all(key in profile.drafters for key in keys):
                self._drafters[drafter.name] = [profile.drafters[key] for key in keys]

    def step_s(self, num_rows: int, num_context: int) -> float:
        return max(_LEAST_S, self._step.at(num_rows, num_context))

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return max(_LEAST_S, self._prefill.at(num_rows, num_context))

    def table(self, num_context: int) -> TableCost:
        knots = self._step.knots
        return TableCost(knots, tuple([self.step_s(knot, num_context) for knot in knots]))

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        parts = self._drafters.get(drafter_of(drafter))
        return None if parts is None else max(part.draft.fit.at(batch, draft_len) for part in parts)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        parts = self._drafters.get(drafter_of(drafter))
        if parts is None:
            return None
        fits = [part.catch_up.fit for part in parts if part.catch_up is not None]
        return sum(max(0.0, fit.at(num_tokens + 1, 0) - fit.at(1, 0)) for fit in fits)


def pool_costs(config: Config, cost: CostModel) -> dict[str, float]:
    """``PoolMember.cost`` of the profiled drafters, by configured name."""
    found = {d.name: relative_draft_cost(cost, d.name, d.max_draft_len) for d in config.drafters}
    return {name: value for name, value in found.items() if value is not None}


def with_measured_costs(config: Config, profile: Profile) -> Config:
    """Fills in the costs of cascades whose members were all profiled. Lookups stay at 0."""
    return config.model_copy(update={"drafters": tuple(_with_costs(drafter, profile) for drafter in config.drafters)})


def _with_costs(drafter: DrafterConfig, profile: Profile) -> DrafterConfig:
    options = drafter.options
    if not isinstance(options, CascadeOptions) or options.costs is not None:
        return drafter
    parts = list(parts_of_drafter(drafter, profile.identity.threads))
    if len(parts) != len(options.members) or any(part.key not in profile.drafters for part in parts):
        return drafter
    one_row_s = max(_LEAST_S, profile.step.fit.at(1, 0))
    drafts_s = [profile.drafters[part.key].draft.fit.at(1, part.draft_len) for part in parts]
    has_model = [part.options.traits.has_model for part in parts]
    costs = [min(100.0, one / one_row_s) if has else 0.0 for one, has in zip(drafts_s, has_model, strict=True)]
    return drafter.model_copy(update={"options": options.costing(costs)})


def _digest(value: JsonValue) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


logger = logging.getLogger(__name__)

REFUSED_PREFIX = f"refused-{PREFIX}"
MAX_ATTEMPTS = 5


def usable_profile(store: StateStore, identity: Identity) -> Profile | None:
    """The stored profile; None if there is none. Logs why it cannot be used; a refused profile stays in the store."""
    try:
        document = store.get(identity.key)
        return None if document is None else read_profile(document.value, identity)
    except ProfileRefused as refused:
        logger.warning("the profile %r is not used: %s; `outrider profile` measures it again", identity.key, refused)
    except StateUnavailable as error:
        logger.warning("%s", error)
    return None


def save_profile(store: StateStore, profile: Profile) -> int:
    """Writes the profile over an older one, and returns its version. Raises as StateStore.put.

    Drafters and links that only the older one has are kept. A refused profile is moved to a key of its own.
    """
    key = profile.identity.key
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return _replace(store, key, profile)
        except StateConflict:
            continue  # another writer won: its profile is supplemented too
    return _replace(store, key, profile)


def _replace(store: StateStore, key: str, profile: Profile) -> int:
    document = store.get(key)
    if document is None:
        return store.put(key, profile.to_json(), expected_version=0)
    try:
        profile = profile.supplemented(read_profile(document.value, profile.identity))
    except ProfileRefused as refused:
        aside = f"{REFUSED_PREFIX}/{key.rsplit('/', 1)[-1]}/{document.version}"
        store.put(aside, document.value)
        logger.warning("profile %r is replaced (%s); it was kept as %r", key, refused, aside)
    return store.put(key, profile.to_json(), expected_version=document.version)
