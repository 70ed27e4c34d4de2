"""The policies of draft length, verification and overlap, by the names that the configuration knows them by.

A planner makes its own, so a policy may keep state. Outputs do not depend on the choice.
"""

from collections.abc import Callable, Mapping

from cluster.config import Config, DraftLengthConfig
from router.drafting.length import DraftLengths, Fixed, Threshold
from router.drafting.length_rule import Outrider
from router.drafting.overlap import Barrier, ByGain, FrontierAlways, MicroBatches, OverlapPolicy
from router.drafting.verification import VerificationPolicy, VerifyAll
from router.drafting.verification_rule import OutriderVerification
from router.papers.adaspec import AdaSpec, AdaSpecVerification
from router.papers.dspark import AsynchronousDSparkVerification, DSparkVerification
from router.papers.faser import Faser
from router.papers.turbospec import GoodputVerification, TurboSpec

# Made from the longest proposal of each drafter and the policy's parameters.
DRAFT_LENGTHS: dict[str, Callable[..., DraftLengths]] = {
    "outrider": Outrider,
    "fixed": Fixed,
    "threshold": Threshold,
    "adaspec": AdaSpec,
    "faser": Faser,
    "turbospec": TurboSpec,
}

VERIFICATION_POLICIES: dict[str, Callable[[], VerificationPolicy]] = {
    "all": VerifyAll,
    "goodput": GoodputVerification,
    "adaspec": AdaSpecVerification,
    "dspark": DSparkVerification,
    "dspark-async": AsynchronousDSparkVerification,
    "outrider": OutriderVerification,
}

OVERLAP_POLICIES: dict[str, Callable[[float], OverlapPolicy]] = {  # made with the maximum hold, in seconds
    "gain": ByGain,
    "barrier": Barrier,
    "micro-batch": MicroBatches,
    "frontier": FrontierAlways,
}


def build_draft_lengths(config: DraftLengthConfig, max_lens: Mapping[str, int]) -> DraftLengths:
    """``max_lens``: the longest proposal of each drafter, by name."""
    return DRAFT_LENGTHS[config.kind](max_lens, **config.parameters)


def draft_lengths_of(config: Config) -> DraftLengths:
    return build_draft_lengths(config.planner.draft_length, {one.name: one.max_draft_len for one in config.drafters})
