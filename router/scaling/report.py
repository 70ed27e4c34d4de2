"""What a scaler is told, and what it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Replicas:
    """Of targets, or of one drafter."""

    num_ready: int = 0
    num_starting: int = 0

    @property
    def num_wanted(self) -> int:
        """Those that draining replicas are not among."""
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """Requests that came to a target, refused ones included, and those that ended, since its start."""

    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_ended: int = 0
    num_output_tokens: int = 0

    def plus(self, other: "ServedCounts") -> "ServedCounts":
        return ServedCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def minus(self, other: "ServedCounts") -> "ServedCounts":
        return ServedCounts(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))


NOTHING_SERVED = ServedCounts()


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A fleet at one moment. ``num_arrived`` and the counts after it: since the report before."""

    now_s: float
    targets: Replicas
    drafters: Mapping[str, Replicas] = field(default_factory=dict)
    num_waiting: float = 0.0  # requests without a place in a target
    num_running: float = 0.0
    busy: float = 0.0  # share of the places of the targets that are ready, or of their time if that is more
    num_arrived: float = 0.0  # requests, refused ones included
    num_prompt_tokens: float = 0.0  # of those that arrived
    num_missed: float = 0.0  # requests that missed an objective or were refused
    num_ended: float = 0.0
    num_output_tokens: float = 0.0  # of those that ended
    acceptance: Mapping[str, float] = field(default_factory=dict)  # of drafters for which it was measured; as `DrafterSize`


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Replicas that there shall be."""

    num_targets: int
    num_drafters: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""  # for people
