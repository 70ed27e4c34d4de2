"""Colocated drafters: loaded in the target's process, linked to its loop in memory, and stepped on its thread or in
a lane of its device."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.config import Config, DrafterConfig
from cluster.errors import InvalidField, OutriderError
from cluster.messages import Hello, Role
from cluster.transport import connect, listen
from cluster.transport.base import Mailbox
from cluster.types import ModelInfo
from drafters.hidden_states.host import Host
from drafters.loop import DrafterLoop
from drafters.registry import feature_layers, make_drafter
from drafters.sessions import SessionLimits
from engine.cpu_setup import in_own_thread
from engine.loading import load_target, prepare_partition, stored_profile
from engine.models.prepare import ensure_model
from engine.partition import Lane
from engine.pass_timing import warm_up
from engine.round import TargetLoop
from engine.target import LoadedTarget
from engine.tensor_parallel.ranks import RankGroup
from profiler.online_cost import OnlineCost
from profiler.profile import Profile, ProfiledCost, with_measured_costs
from router.assignment import member_name
from router.cost_model import CostModel, padded
from router.drafting.partition_choice import WHOLE, PartitionChoice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColocatedDrafter:
    """A drafter's loop and its mailbox."""

    name: str
    loop: DrafterLoop
    mailbox: Mailbox
    warm_ups: Sequence[Callable[[], None]]  # of the drafter, or its members, for the lane of the calling thread


def load_with_colocated(
    config: Config, profile: Profile | None = None, remembers: bool = False, ranks: RankGroup | None = None
) -> tuple[LoadedTarget, ModelInfo, OnlineCost, list[ColocatedDrafter]]:
    """Loads the target of a resolved configuration, as ``engine.loading.load_target``, and the drafters in its process.

    ``profile`` has the measured costs of cascades' members. Raises OutriderError if a model is missing or does not fit.
    ``ranks``: as of ``load_target``.
    """
    measured = config if profile is None else with_measured_costs(config, profile)
    drafters = tuple(drafter for drafter in measured.drafters if drafter.is_colocated)
    readers = [drafter for drafter in config.drafters if drafter.options.traits.reads_hidden_states]
    folder = ensure_model(config.model.name, engine=config.target.engine)
    engine, model, cost = load_target(config, feature_layers(readers, folder), profile, remembers, ranks)
    host = Host(engine, folder)
    return engine, model, cost, [_colocated(drafter, model, host) for drafter in drafters]


def link_colocated(drafters: Sequence[ColocatedDrafter], loop: TargetLoop, hello: Hello) -> None:
    """Links drafters to the target of ``hello``, whose thread steps their loops, or starts threads for them."""
    address = f"memory://colocated-{os.getpid()}-{hello.name}"
    if drafters:
        listen(address, loop.mailbox, hello)
    for drafter in drafters:
        own = Hello(Role.DRAFTER, drafter.name, hello.vocab_size, hello.tokenizer_fingerprint, hello.token)
        loop.inline.add(drafter.loop, connect(address, drafter.mailbox, own).close)


def divide(
    config: Config, loop: TargetLoop, engine: LoadedTarget, profile: Profile | None, colocated: Sequence[ColocatedDrafter]
) -> None:
    """Divides the target's device with the drafters of a resolved configuration, before the loop runs, and warms each lane
    up. ``profile``: of the whole device. Raises as `engine.loading.prepare_partition`; also where a lane cannot be warmed
    up."""
    partition = prepare_partition(config)
    if partition is None:
        return
    found = {split.name: stored_profile(config, split.name) for split in partition.splits}
    profiles = {name: one for name, one in found.items() if one is not None}
    if config.target.partition == "auto":
        if profile is None or not profiles:
            partition.close()
            return
        profiles[WHOLE] = profile
    warm_ups = [call for one in colocated for call in one.warm_ups]
    try:
        for split in partition.splits:
            in_own_thread(partial(_call_in, split.drafter, warm_ups))
            if config.target.device == "cuda":
                in_own_thread(partial(_call_in, split.target, [partial(warm_up, engine)]))
    except (OutriderError, RuntimeError) as error:  # of torch: a device out of memory, or a failed launch
        partition.close()
        if config.target.partition == "on":
            raise InvalidField("target.partition", "on", f"a part of the device cannot be warmed up ({error})") from error
        logger.warning("drafters in the target's process draft by turns with it: %s", error)
        return
    rows = engine.capacity().prepared_rows
    costs: dict[str, CostModel | None] = {name: padded(ProfiledCost(one, config), rows) for name, one in profiles.items()}
    drafters = {member_name(one.name, 0): one.max_draft_len for one in config.drafters if one.is_colocated}
    loop.divide(partition, PartitionChoice(costs or {partition.splits[0].name: None}, drafters))


def _call_in(lane: Lane, calls: Sequence[Callable[[], None]]) -> None:
    lane.enter()
    for call in calls:
        call()
    lane.enter()  # waits for what it has launched


def _colocated(config: DrafterConfig, model: ModelInfo, host: Host) -> ColocatedDrafter:
    name, mailbox = member_name(config.name, 0), Mailbox()
    limits = SessionLimits(capacity=config.capacity, max_draft_len=config.max_draft_len, max_shadows=config.capacity)
    num_before = len(host.warm_ups)
    drafter = make_drafter(config, model, host)
    loop = DrafterLoop(name, drafter, mailbox, limits, spare_share=0.0)
    return ColocatedDrafter(name, loop, mailbox, tuple(host.warm_ups[num_before:]))
