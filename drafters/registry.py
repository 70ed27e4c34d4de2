"""Makes drafters from their configuration. Imports what a kind needs on demand: lookups need no torch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cluster.config import (
    MAX_LEARNED,
    CascadeOptions,
    DrafterConfig,
    DrafterOptions,
    HiddenStateKind,
    HiddenStateOptions,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
    VllmOptions,
    parts_of,
)
from cluster.errors import IncompatibleTokenizer, InvalidField
from cluster.types import MAX_DRAFT_LEN, ModelInfo
from drafters.protocol import Drafter
from engine.dtypes import choose_dtype
from router.assignment import prior_member_cost

if TYPE_CHECKING:
    from drafters.hidden_states.host import Host


@dataclass(frozen=True, slots=True)
class Site:
    """Where a drafter will run, and for which target."""

    target: ModelInfo
    device: str
    host: "Host | None" = None  # if it runs in the target's process
    clock: Callable[[], float] | None = None  # of cascades and chains
    proposers: Mapping[str, Drafter] = field(default_factory=dict)  # of a drafter that can verify, by name
    max_draft_len: int = MAX_DRAFT_LEN


def make_drafter(
    config: DrafterConfig,
    target: ModelInfo,
    host: "Host | None" = None,
    clock: Callable[[], float] | None = time.monotonic,
    proposers: Sequence[DrafterConfig] = (),
) -> Drafter:
    """The drafter of a resolved configuration, for ``target``.

    Args:
        host: the target's process, for a colocated drafter.
        clock: times the members of a cascade or chain; None where no target waits for drafts.
        proposers: possible levels of a chain below it, smallest first, each of which may have those before it.

    Raises:
        IncompatibleTokenizer: it serves only its own target, whose token ids differ, or has no token of the target's.
        ModelUnavailable: its model is missing, half-written or unsupported.
        InvalidField: an option is out of range, or its KV cache holds nothing.
    """
    device = "cpu" if config.device == "auto" else config.device
    site = Site(target, device, host, clock, max_draft_len=config.max_draft_len)
    for proposer in proposers:
        site = replace(site, proposers={**site.proposers, proposer.name: make(proposer.options, site)})
    return make(config.options, site)


def make(options: DrafterOptions, site: Site) -> Drafter:
    """As ``make_drafter``; a cascade makes its members so."""
    return FACTORIES[options.kind](options, site)


def feature_layers(drafters: Sequence[DrafterConfig], model: Path) -> tuple[int, ...]:
    """The layers of the target in the folder ``model`` whose hidden states some drafter reads, ascending. Raises
    ModelUnavailable."""
    from drafters.hidden_states.formats import num_layers_of, read_config
    from drafters.shipped import find_drafter

    parts = [part for drafter in drafters for part in parts_of(drafter.options) if isinstance(part, HiddenStateOptions)]
    num_layers = num_layers_of(model) if parts else 0
    configs = [read_config(find_drafter(part.path), num_layers) for part in parts]
    return tuple(sorted({layer for config in configs for layer in config.target_layer_ids}))


def _make_ngram(options: NgramOptions, site: Site) -> Drafter:
    from drafters.native.lookup import compiled
    from drafters.ngram import NgramDrafter

    return compiled(NgramDrafter(options.max_match_len, options.min_match_len))


def _make_suffix(options: SuffixOptions, site: Site) -> Drafter:
    from drafters.native.lookup import lookups, suffix

    library = lookups()
    if library is None:
        return _make_ngram(NgramOptions(), site)
    return suffix(library, options.max_shared_tokens)


def make_table(options: TableOptions, site: Site, max_learned: int = MAX_LEARNED) -> Drafter:
    """``max_learned``: contexts; 0: it drafts what was counted alone."""
    from drafters.native.lookup import lookups
    from drafters.shipped import find_table
    from drafters.table import EMPTY, FrequencyTable, table_drafter

    counted = EMPTY
    if options.path is not None:
        counted = FrequencyTable.load(find_table(options.path))
        counted.check_serves(site.target)
    library = lookups()
    return _make_ngram(NgramOptions(), site) if library is None else table_drafter(library, counted, max_learned)


def _make_model(options: ModelOptions | LayersOptions, site: Site) -> Drafter:
    from drafters.model import ModelDrafter
    from drafters.other_vocabulary import other_vocabulary
    from drafters.small_model import SmallModel
    from engine.kv_cache import num_blocks_for
    from engine.models.prepare import ensure_model, settings_folder
    from engine.models.tokenizer import fingerprint

    target = site.target.name if options.target == "auto" else options.target
    calibration, min_survival, output_ids, vocabulary = None, 0.0, None, None
    if isinstance(options, LayersOptions):
        from drafters.layers import load_layers
        from drafters.shipped import find_drafter
        from profiler.calibration import FILE, load_calibration

        target_folder = ensure_model(target)
        if fingerprint(target_folder) != site.target.tokenizer_fingerprint:
            raise IncompatibleTokenizer(f"the tokenizer of {target_folder} is not that of {site.target.name}")
        folder, dtype = find_drafter(options.path), choose_dtype(options.dtype, site.device, allows_int8=True)
        model, output_ids = load_layers(folder, target_folder, dtype, site.device)
        calibration = load_calibration(folder / FILE) if (folder / FILE).is_file() else None
        min_survival = options.min_survival
    else:
        from engine.factory import load_model

        folder = ensure_model(options.model)
        model = load_model(folder, options.dtype, site.device, options.num_layers)
        if fingerprint(folder) != site.target.tokenizer_fingerprint:
            vocabulary = other_vocabulary(folder, model.config, settings_folder(target), site.target)
    small = SmallModel(
        model,
        num_blocks=num_blocks_for(model.config, int(options.kv_cache_gb * 2**30), model.kv_dtype),
        vocab_size=site.target.vocab_size,
        eos_token_ids=site.target.eos_token_ids,
        output_ids=output_ids,
        vocabulary=vocabulary,
    )
    if site.host is not None:
        site.host.warm_ups.append(small.warm_up)
    return ModelDrafter(small, site.proposers, min_survival=min_survival, calibration=calibration, clock=site.clock)


def _make_on_hidden_states(options: HiddenStateOptions, site: Site) -> Drafter:
    from drafters.hidden_states.host import make_hidden_state_drafter

    if site.host is None:
        raise InvalidField("kind", options.kind, "reads the target's hidden states, so it must run in the target's process")
    return make_hidden_state_drafter(options, site.target, site.host, site.max_draft_len)


def _make_vllm(options: VllmOptions, site: Site) -> Drafter:
    from drafters.engine_proposals import EngineProposals, Proposing

    engine = None if site.host is None else site.host.engine
    if not isinstance(engine, Proposing):
        raise InvalidField("kind", options.kind, "is a proposer of vLLM, so it needs target.engine vllm")
    return EngineProposals(engine)


def _make_cascade(options: CascadeOptions, site: Site) -> Drafter:
    from drafters.cascade import CascadeDrafter, CascadeMember
    from drafters.native.lookup import lookups

    costs = options.costs or [prior_member_cost(member) for member in options.members]
    chosen = list(zip(options.members, costs, strict=True))
    if lookups() is None:  # ngram would draft for these lookups
        chosen = [one for one in chosen if one[0].kind not in ("suffix", "table")] or chosen[:1]
    site = replace(site, proposers={})
    members = [
        CascadeMember(f"{i}:{member.kind}", make(member, site), cost, splices=not member.traits.has_model)
        for i, (member, cost) in enumerate(chosen)
    ]
    return CascadeDrafter(members, site.clock, few_trials=site.host is not None)


FACTORIES: dict[str, Callable[[Any, Site], Drafter]] = {
    "ngram": _make_ngram,
    "suffix": _make_suffix,
    "table": make_table,
    "model": _make_model,
    "layers": _make_model,
    "vllm": _make_vllm,
    **dict.fromkeys(get_args(HiddenStateKind), _make_on_hidden_states),
    "cascade": _make_cascade,
}
