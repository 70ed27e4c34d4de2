"""The drafters that are compared: without training, shipped, and cascades of both."""

from cluster.config import (
    CascadeOptions,
    DrafterConfig,
    DrafterOptions,
    HiddenStateOptions,
    LayersOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
)
from drafters.shipped import shipped_options


def pool(model: str) -> tuple[DrafterConfig, ...]:
    """All drafters available for ``model``: a table, lookups and their cascade for any model, more for the embedded one.

    The cascade holds the lookups, the table, and the first available trained drafter (dspark, then layers).
    """
    trained: dict[str, DrafterOptions] = {
        name: options.of_target(model) if isinstance(options, LayersOptions) else options
        for name, options in shipped_options(model).items()
    }
    tables = [options for options in trained.values() if isinstance(options, TableOptions)]
    layers = [options for options in trained.values() if isinstance(options, LayersOptions)]
    blocks = [options for options in trained.values() if isinstance(options, HiddenStateOptions)]
    lookups: dict[str, DrafterOptions] = {
        "ngram": NgramOptions(),
        "suffix": SuffixOptions(),
        "table": tables[0] if tables else TableOptions(),
    }
    members = [*lookups.values(), *(blocks or layers)[:1]]
    combined: dict[str, DrafterOptions] = {"cascade": CascadeOptions(members=tuple(members))}
    others = {name: options for name, options in trained.items() if not isinstance(options, TableOptions)}
    everything = lookups | others | combined
    return tuple(DrafterConfig(name=name, options=options) for name, options in everything.items())
