"""Loads the target of a configuration, with its cost model, which is measured once and kept in the state store."""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import torch
from pydantic import Field, JsonValue, ValidationError, model_validator

from cluster.config import Config, DrafterConfig, Section, VllmOptions, parts_of
from cluster.errors import InvalidField, OutriderError
from cluster.state import StateStore, StateUnavailable, open_store
from cluster.types import ModelInfo
from engine.cpu_level import cpu_level
from engine.device import require
from engine.dtypes import resolve_dtypes
from engine.early_exit import EarlyExit
from engine.factory import head_of
from engine.factory import load_target as load_native
from engine.model_facts import max_model_len, read_facts
from engine.models.manifest import code_version
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.native import NativeTarget
from engine.partition import Partition, core_sets, green_contexts
from engine.pass_timing import is_too_steep, measure_cost, warm_up
from engine.target import LoadedTarget
from engine.tensor_parallel.ranks import RankGroup
from engine.tensor_parallel.rounds import Follower
from engine.vllm.environment import prepare_environment
from profiler.hardware import cpu_name
from profiler.latency import Seconds
from profiler.online_cost import OnlineCost
from profiler.profile import WHOLE_DEVICE, Identity, Profile, ProfiledCost, usable_profile
from router.cost_model import ROWS, CostModel, TableCost, monotone, padded

logger = logging.getLogger(__name__)


def load_target(
    config: Config,
    feature_layers: Sequence[int] = (),
    profile: Profile | None = None,
    remembers: bool = False,
    ranks: RankGroup | None = None,
) -> tuple[LoadedTarget, ModelInfo, OnlineCost]:
    """The target of a resolved configuration, the description of its model, and its cost model. Raises as ``load_engine``.

    Args:
        feature_layers: layers whose hidden states are kept for drafters in this process.
        profile: a stored profile (``stored_profile``); without one, costs are measured now, in seconds.
        remembers: store measured costs in the configured state store, and reuse those of earlier starts.
        ranks: of which this process is rank 0; None: the other ranks of a tensor parallel target are started here.
    """
    logger.info("the target loads the weights of %s", config.model.name)
    engine, info = load_engine(config, feature_layers, ranks)
    cost: CostModel
    if profile is not None:
        _warm_up(config, engine)
        cost = ProfiledCost(profile, config)
    else:
        cost = _remembered_cost(config, engine) if remembers else measure_cost(engine)
    if config.target.early_exit == "auto" and isinstance(engine, NativeTarget):
        head = head_of(engine.model, ensure_model(config.model.name))
        engine.exit_early(EarlyExit(engine.model, cost, head))
    return engine, info, OnlineCost(padded(cost, engine.capacity().prepared_rows))


def _remembered_cost(config: Config, engine: LoadedTarget) -> TableCost:
    """Costs of an earlier start, checked by a few passes, or else measured now and stored."""
    with closing(open_store(config.cluster.state, config.cluster.namespace)) as store:
        memory = CostMemory(store, identity_of(config), engine.operators)
        cost = memory.recall()
        if cost is not None:
            _warm_up(config, engine)
            if is_too_steep(cost, engine):
                logger.warning("stored pass costs rise faster with the rows than passes do now, and are measured again")
                cost = None
        if cost is None:
            logger.info("the target measures the costs of its passes, once for this configuration and machine")
            cost = measure_cost(engine)
            memory.keep(cost)
        return cost


def _warm_up(config: Config, engine: LoadedTarget) -> None:
    """Warms up a target whose costs are known. On a GPU every pass size compiles kernels and captures its own graph."""
    warm_up(engine, ROWS if config.target.device == "cuda" else (1, 8))


def stored_profile(config: Config, partition: str = WHOLE_DEVICE) -> Profile | None:
    """The stored `outrider profile` of a resolved configuration on this machine, in a compute partition. None if there is no
    usable one; the log says why an existing one is unusable."""
    with closing(open_store(config.cluster.state, config.cluster.namespace)) as store:
        profile = usable_profile(store, identity_of(config, partition))
    if profile is not None and partition == WHOLE_DEVICE and (names := profile.unmatched(config)):
        message = "the profile has no times of the drafters %s as they are configured: run `outrider profile`"
        logger.warning(message, ", ".join(dict.fromkeys(names)))
    return profile


def prepare_partition(config: Config) -> Partition | None:
    """Of the device of a resolved configuration's target; None where its drafters there take turns with it. Raises
    OutriderError: ``target.partition`` is on, and the device cannot be divided."""
    target, threads = config.target, config.target.resources.threads
    colocated = [drafter for drafter in config.drafters if drafter.is_colocated]
    if target.partition == "off" or not target.can_divide or not colocated:
        return None
    try:
        found = green_contexts() if target.device == "cuda" else core_sets(None if threads == "auto" else threads)
        if not found.splits:
            raise InvalidField("target.partition", target.partition, "there are too few cores or multiprocessors to divide")
    except OutriderError as error:
        if target.partition == "on":
            raise
        logger.info("drafters in the target's process draft by turns with it: %s", error)
        return None
    return found


def identity_of(config: Config, partition: str = WHOLE_DEVICE) -> Identity:
    """The key of the target's profile in a partition on this machine at its CPU level. Raises InvalidField: its device is a
    GPU, and there is none."""
    config = resolve_dtypes(config)
    require(config.target.device)
    if config.target.device == "cuda":
        return Identity.of(config, torch.cuda.get_device_name(), partition)
    level = cpu_level()
    return Identity.of(config, f"{cpu_name()} as {level.name}" if level.is_lowered else cpu_name(), partition)


def load_engine(
    config: Config, feature_layers: Sequence[int] = (), ranks: RankGroup | None = None
) -> tuple[LoadedTarget, ModelInfo]:
    """As ``load_target``, without the cost model. ``close`` ends the ranks that this started.

    Raises ModelUnavailable: missing, half-written or unsupported; one line that says which; InvalidField: the KV cache
    cannot hold a sequence of the longest kind; there are too many ranks; vLLM is missing, or another.
    """
    target = config.target
    folder = ensure_model(config.model.name, engine=target.engine)
    if target.engine == "vllm":
        prepare_environment()
    model = read_facts(config, folder, in_process=True)
    name, *aliases = config.model.public_names
    info = ModelInfo(
        name=name,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len(config, model),
        eos_token_ids=model.eos_token_ids,
        tokenizer_fingerprint=fingerprint(folder),
        aliases=tuple(aliases),
        adapters=tuple(module.adapter for module in target.lora_modules),
        max_adapters=target.num_adapters,
    )
    if target.engine == "vllm":
        from engine.vllm.target import load_vllm

        return load_vllm(folder, target, info, feature_layers, proposer_of(config.drafters)), info
    options = _native_options(config, info.max_model_len)
    if target.tensor_parallel == 1:
        return load_native(folder, **options, feature_layers=feature_layers), info
    if ranks is not None:
        engine = load_native(folder, **options, feature_layers=feature_layers, ranks=ranks)
        ranks.wait_ready(config.supervision.start_timeout_s)
        return engine, info
    from engine.tensor_parallel.local import load_over_local_ranks

    num_threads = 1 if target.resources.threads == "auto" else target.resources.threads
    start_s = config.supervision.start_timeout_s
    return load_over_local_ranks(target.tensor_parallel, folder, options, feature_layers, num_threads, start_s), info


def proposer_of(drafters: Sequence[DrafterConfig]) -> dict[str, Any]:
    """vLLM's speculative configuration of its own proposer; {}: there is none among the drafters."""
    for drafter in drafters:
        for part in parts_of(drafter.options):
            if isinstance(part, VllmOptions):
                model = part.speculative.get("model")
                if model is None:
                    return part.speculative
                return {**part.speculative, "model": str(ensure_model(str(model), engine="vllm", with_tokenizer=False))}
    return {}


def load_follower(config: Config, ranks: RankGroup) -> Follower:
    """A rank other than the first, of a resolved configuration. Returns when all ranks are loaded. Raises as
    ``load_engine``."""
    folder = ensure_model(config.model.name)
    options = _native_options(config, max_model_len(config, read_facts(config, folder)))
    engine = load_native(folder, **options, ranks=ranks)
    ranks.wait_ready(config.supervision.start_timeout_s)
    return Follower(engine, ranks)


def _native_options(config: Config, longest: int) -> dict[str, Any]:
    """What all ranks must agree on."""
    target = config.target
    return {
        "dtype": target.dtype,
        "device": target.device,
        "kv_cache_bytes": target.kv_cache_bytes,
        "block_len": target.block_len,
        "max_num_sequences": target.max_num_sequences,
        "max_pass_tokens": target.longest_pass,
        "max_model_len": longest,
    }


PREFIX = "cost"


class _Stored(Section):
    """A ``TableCost`` as JSON: (rows, seconds), rows ascending and seconds not falling."""

    points: Annotated[tuple[tuple[int, Seconds], ...], Field(min_length=1, max_length=64)]
    per_context_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _is_a_table(self) -> "_Stored":
        rows = [num_rows for num_rows, _ in self.points]
        if rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"rows must be positive and ascend, got {rows}")
        return self


class CostMemory:
    """Costs of one target on this machine with this version of the engine. An unusable store is logged and counts as empty.
    ``operators``: name of the operators' class; without kernels a pass costs several times as much."""

    def __init__(self, store: StateStore, identity: Identity, operators: str) -> None:
        self._store = store
        known = f"{identity.model_dump_json()} {code_version()} {operators}"
        self._key = f"{PREFIX}/{hashlib.sha256(known.encode()).hexdigest()[:32]}"

    def recall(self) -> TableCost | None:
        """The stored costs; None if there are no usable ones."""
        try:
            document = self._store.get(self._key)
            found = None if document is None else _Stored.model_validate_json(json.dumps(document.value))
            return None if found is None else monotone(found.points, found.per_context_s)
        except StateUnavailable as error:
            logger.warning("stored pass costs cannot be read: %s", error)
        except ValidationError as error:
            logger.warning("state %r is not a cost table, passes are measured again: %s", self._key, error)
        return None

    def keep(self, cost: TableCost) -> None:
        points: list[JsonValue] = [[rows, seconds] for rows, seconds in zip(cost.rows, cost.step_s_at, strict=True)]
        try:
            self._store.put(self._key, {"points": points, "per_context_s": cost.per_context_s})
        except (StateUnavailable, InvalidField) as error:
            logger.warning("pass costs cannot be stored, the next start measures them again: %s", error)
