"""When to verify (``planner.overlap``): which requests a pass takes, which wait, and what drafters draft meanwhile."""

from collections.abc import Callable

from router.overlap.default import ByGain
from router.overlap.policy import OverlapPolicy, PassStart
from router.overlap.rules import Barrier, FrontierAlways, MicroBatches

__all__ = ["OVERLAP_POLICIES", "OverlapPolicy", "PassStart"]

OVERLAP_POLICIES: dict[str, Callable[[float], OverlapPolicy]] = {  # made with the maximum hold, in seconds
    "gain": ByGain,
    "barrier": Barrier,
    "micro-batch": MicroBatches,
    "frontier": FrontierAlways,
}
