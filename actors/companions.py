"""Drafters that live in a target's process: made with it, stepped by its round, linked to it within the process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import Config, DrafterConfig
from cluster.messages import Hello, Role
from cluster.transport.base import Mailbox
from cluster.transport.factory import connect, listen
from cluster.types import ModelInfo
from drafters.companions import Host
from drafters.feature_layers import feature_layers
from drafters.loop import DrafterLoop
from drafters.registry import make_drafter
from drafters.sessions import SessionLimits
from engine.loading import load_target
from engine.models.prepare import ensure_model
from engine.native import NativeTarget
from profiler.online_cost import OnlineCost
from profiler.profile import Profile, with_measured_costs
from router.assignment import member_name


@dataclass(frozen=True, slots=True)
class Companion:
    """A drafter's loop, and the mailbox by which it is linked."""

    name: str
    loop: DrafterLoop
    mailbox: Mailbox


def companions_of(config: Config) -> tuple[DrafterConfig, ...]:
    return tuple(drafter for drafter in config.drafters if drafter.is_companion)


def load_with_companions(
    config: Config, profile: Profile | None = None, remembers: bool = False
) -> tuple[NativeTarget, ModelInfo, OnlineCost, list[Companion]]:
    """The target of a resolved configuration, as ``engine.loading.load_target``, and the drafters beside it.

    Cascades among them know what their members cost if ``profile`` does.

    Raises:
        OutriderError: a model is missing, or does not fit; says which.
    """
    drafters = companions_of(config if profile is None else with_measured_costs(config, profile))
    engine, model, cost = load_target(config, feature_layers(drafters), profile, remembers)
    host = Host(engine, ensure_model(config.model.name))
    return engine, model, cost, [_companion(drafter, model, host) for drafter in drafters]


def link_companions(companions: Sequence[Companion], mailbox: Mailbox, hello: Hello) -> None:
    """Links them to the target that says ``hello`` and reads ``mailbox``. The links last as long as the process."""
    address = f"memory://companions-{os.getpid()}-{hello.name}"
    if companions:
        listen(address, mailbox, hello)
    for companion in companions:
        own = Hello(Role.DRAFTER, companion.name, hello.vocab_size, hello.tokenizer_fingerprint, hello.token)
        connect(address, companion.mailbox, own)


def _companion(config: DrafterConfig, model: ModelInfo, host: Host) -> Companion:
    name, mailbox = member_name(config.name, 0), Mailbox()
    limits = SessionLimits(capacity=config.capacity, max_draft_len=config.max_draft_len, max_shadows=0)
    loop = DrafterLoop(name, make_drafter(config, model, host), mailbox, limits, ahead_len=config.ahead_len)
    return Companion(name, loop, mailbox)
