"""The target's layers whose hidden states drafters read. No torch."""

from collections.abc import Sequence

from cluster.config import DrafterConfig, DSparkOptions, parts_of
from drafters.dspark.config import load_dspark_config
from drafters.shipped import find_drafter


def feature_layers(drafters: Sequence[DrafterConfig]) -> tuple[int, ...]:
    """Layers read by some drafter, ascending.

    Raises:
        ModelUnavailable: a drafter is missing or not supported.
    """
    parts = [part for drafter in drafters for part in parts_of(drafter.options) if isinstance(part, DSparkOptions)]
    configs = [load_dspark_config(find_drafter(part.path)) for part in parts]
    return tuple(sorted({layer for config in configs for layer in config.target_layer_ids}))
