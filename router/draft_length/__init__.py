"""How far to draft: for each request, how many tokens its drafter may propose and what one more token costs."""

from collections.abc import Callable, Mapping
from typing import Any

from cluster.config import Config, DraftLengthConfig
from router.draft_length.adaspec import AdaSpec
from router.draft_length.base import BatchState, DraftLengths, PassFeedback
from router.draft_length.faser import Faser
from router.draft_length.fixed import Fixed
from router.draft_length.outrider import Outrider
from router.draft_length.prices import PRICE_STEPS, DecodeRate, QuotedPrice, row_price
from router.draft_length.threshold import Threshold
from router.draft_length.turbospec import TurboSpec

__all__ = [
    "DRAFT_LENGTHS",
    "PRICE_STEPS",
    "BatchState",
    "DecodeRate",
    "DraftLengths",
    "PassFeedback",
    "QuotedPrice",
    "build_draft_lengths",
    "draft_lengths_of",
    "row_price",
]

# By ``kind``: made from its options and the longest proposal of each drafter.
DRAFT_LENGTHS: dict[str, Callable[[Any, Mapping[str, int]], DraftLengths]] = {
    "outrider": lambda _, max_lens: Outrider(max_lens),
    "fixed": Fixed,
    "threshold": Threshold,
    "adaspec": lambda _, max_lens: AdaSpec(max_lens),
    "faser": Faser,
    "turbospec": lambda _, max_lens: TurboSpec(max_lens),
}


def build_draft_lengths(config: DraftLengthConfig, max_lens: Mapping[str, int]) -> DraftLengths:
    """``max_lens``: the longest proposal of each drafter, by name."""
    return DRAFT_LENGTHS[config.kind](config, max_lens)


def draft_lengths_of(config: Config) -> DraftLengths:
    return build_draft_lengths(config.planner.draft_length, {one.name: one.max_draft_len for one in config.drafters})
