"""What a scenario file may say: hardware, models, requests, policies. Strict: an unknown key is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from cluster import strict_yaml
from cluster.config import Count, PolicyConfig, Seconds, Section, SloClass
from simulator.roofline import Device, NonNegative, Placed, Positive, RooflineCost, Shape
from simulator.synthetic import Family

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]


class Lens(Section):
    """Log-normal lengths, cut to a range."""

    median: Annotated[float, Field(ge=1)]
    spread: Annotated[float, Field(ge=0, le=3)] = 0.5  # of the logarithm
    least: Count = 1
    most: Count = 4096

    def draw(self, random: np.random.Generator) -> int:
        return int(
            np.clip(round(self.median * float(np.exp(self.spread * random.standard_normal()))), self.least, self.most)
        )


class TextWorkload(Section):
    """Requests of one kind."""

    prompt_len: Lens
    output_len: Lens
    family: Family
    slo: SloClass = SloClass()


class DrafterModel(Section):
    """A drafter of the pool."""

    shape: Shape
    device: str
    max_draft_len: Annotated[int, Field(ge=1, le=64)] = 4
    capacity: Count = 64  # requests at once: SPIN's B_j
    replicas: Count = 1
    verifies: bool = True  # others can ride ahead of it


class TargetModel(Section):
    shape: Shape
    device: str
    parallelism: Count = 1


class _Pool(Section):
    devices: Mapping[str, Device]
    drafters: Mapping[Name, DrafterModel]
    link_us: NonNegative = 100.0
    slot_s: Seconds = 0.25
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0

    def cost(self, target: TargetModel) -> RooflineCost:
        drafters = {
            name: Placed(shape=drafter.shape, device=self.devices[drafter.device]) for name, drafter in self.drafters.items()
        }
        placed = Placed(shape=target.shape, device=self.devices[target.device], parallelism=target.parallelism)
        return RooflineCost(placed, drafters)

    def known_devices(self, *wanted: str) -> None:
        for device in (*wanted, *(drafter.device for drafter in self.drafters.values())):
            if device not in self.devices:
                raise ValueError(f"device {device!r} is not among devices ({', '.join(self.devices)})")

    def known_drafters(self, family: Family) -> None:
        missing = set(self.drafters) - set(family.drafters)
        if missing:
            raise ValueError(f"a family says nothing of {', '.join(sorted(missing))}")


class SpinScenario(_Pool):
    """SPIN's evaluation: sets of ``batch`` requests on several targets and kinds of text, which go on to the end."""

    study: Literal["spin"]
    targets: Mapping[Name, TargetModel]
    texts: Mapping[Name, TextWorkload]
    mix: bool = True  # a further kind of text, drawn from all
    batch: Count = 8
    horizon_s: Seconds = 240.0
    repeats: Count = 2
    micro_batches: Count = 2
    lbss: PolicyConfig = PolicyConfig(kind="lbss")
    epsilon_greedy: PolicyConfig = PolicyConfig(kind="epsilon-greedy", epsilon=0.8)
    max_hold_s: Seconds = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.known_devices(*(target.device for target in self.targets.values()))
        for text in self.texts.values():
            self.known_drafters(text.family)
        return self


class ChainCase(Section):
    """A pool in which it is known whether three levels win."""

    target: TargetModel
    drafters: Mapping[Name, DrafterModel]
    text: TextWorkload
    two_level: Name
    three_level: tuple[Name, Name]


class SpecRouterScenario(_Pool):
    """SpecRouter's table 2: chains chosen by batch size against static ones. ``cases``: other pools, by name."""

    study: Literal["specrouter"]
    target: TargetModel
    text: TextWorkload
    batches: Annotated[tuple[Count, ...], Field(min_length=1)]
    two_level: Name  # the drafter of static speculation
    three_level: tuple[Name, Name]
    horizon_s: Seconds = 20
    least_requests: Count = 32  # of each batch size, in sets of it
    chain: PolicyConfig = PolicyConfig(kind="chain")
    cases: Mapping[Name, ChainCase] = Field(default_factory=dict)
    case_batches: tuple[Count, ...] = (1, 8)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.known_devices(self.target.device)
        self.known_drafters(self.text.family)
        for name in (self.two_level, *self.three_level):
            if name not in self.drafters:
                raise ValueError(f"{name!r} is not among drafters ({', '.join(self.drafters)})")
        for case in self.cases:
            self.of_case(case)
        return self

    def of_case(self, name: str) -> "SpecRouterScenario":
        """The scenario of one of ``cases``."""
        case, fields = self.cases[name], self.model_dump(exclude={"cases"})
        return SpecRouterScenario.model_validate(fields | case.model_dump() | {"batches": self.case_batches})


class Recorded(Section):
    """A trace in a folder of data, ``times`` as fast as it was. ``file`` is relative to that folder."""

    file: Path
    times: Positive = 1.0

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.file.is_absolute() or ".." in self.file.parts:
            raise ValueError("file must be a path within the folder of data")
        return self


class ServingScenario(_Pool):
    """A cluster under a stream of requests, once for each policy, and once without drafting."""

    study: Literal["serving"]
    target: TargetModel
    num_targets: Count
    max_num_sequences: Count = 64
    max_pass_tokens: Count = 2048
    texts: Mapping[Name, TextWorkload]
    requests_per_s: Positive
    trace: Path | None = None  # arrivals and lengths from a file, ``requests_per_s`` times as fast as there
    recorded: Recorded | None = None  # the trace where there is a folder of data; elsewhere arrivals are drawn
    max_prompt_len: Count = 8192  # what is longer in a trace is cut
    max_output_len: Count = 2048
    duration_s: Seconds = 600.0
    max_hold_ms: NonNegative = 50.0
    policies: tuple[PolicyConfig, ...] = (
        PolicyConfig(),
        PolicyConfig(kind="hedge"),
        PolicyConfig(kind="lbss"),
        PolicyConfig(kind="greedy-length"),
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.known_devices(self.target.device)
        for text in self.texts.values():
            self.known_drafters(text.family)
        for policy in self.policies:
            if policy.kind == "chain" or len(policy.chain or ()) > 1:
                raise ValueError("policies must not form chains: what those take, only the study specrouter models")
        return self

    def with_data(self, folder: Path | None) -> Self:
        """With the arrivals that were recorded, if there is a folder of data that holds those which the scenario names."""
        if folder is None or self.recorded is None or not (folder / self.recorded.file).is_file():
            return self
        return self.model_copy(update={"trace": folder / self.recorded.file, "requests_per_s": self.recorded.times})


AnyScenario = SpinScenario | SpecRouterScenario | ServingScenario
STUDIES: Mapping[str, type[AnyScenario]] = {
    "spin": SpinScenario,
    "specrouter": SpecRouterScenario,
    "serving": ServingScenario,
}


class _Kind(Section):
    """Of any scenario; the rest is read when that is known."""

    model_config = ConfigDict(extra="ignore")

    study: Literal["spin", "specrouter", "serving"]


def read_scenario(path: Path) -> AnyScenario:
    """Raises ConfigError, which names every problem with its line."""
    return strict_yaml.read(path, STUDIES[strict_yaml.read(path, _Kind).study])
