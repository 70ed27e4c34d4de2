"""What a scaler is told, and what it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Replicas that there shall be."""

    num_targets: int
    num_drafters: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""  # for people
