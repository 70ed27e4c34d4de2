"""The process that judges chains of models, whatever the policy is: SpecRouter's scheduler (section 4.2).

Each slot the router tells it what targets reported. It profiles the models (pass times T_i, agreement of neighbours),
predicts the time per token T_eff of every candidate chain, and keeps what it learned. With the policy `chain` the router
asks it for the chains of the requests; they keep theirs while it does not answer.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Full, Queue
from threading import Event
from typing import Protocol

from pydantic import JsonValue

from actors.router import RouterMemory
from actors.worker import LoopActor, LoopThread
from cluster.client import ChainStatus
from cluster.config import Config, PolicyConfig
from cluster.state import open_store
from router.assignment import (
    NO_LEVELS,
    TARGET_ONLY,
    AssignmentPolicy,
    Chain,
    Levels,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
)
from router.drafter.policies import build_policy
from router.papers.specrouter import ModelChains

MAX_SLOTS = 4  # that wait to be judged; the router has one under way
ANSWER_S = 0.25  # that the router waits for chains
NUM_REPORTED = 4  # chains, the fastest


@dataclass(frozen=True, slots=True)
class ChainSlot:
    """The arguments of `AssignmentPolicy.observe` and `assign` in a slot."""

    observations: Sequence[Observation] = ()
    scores: Sequence[ScoreCounts] = ()
    levels: Levels = NO_LEVELS
    requests: Sequence[RequestView] = ()
    pool: Sequence[PoolMember] = ()


class ModelChainScheduler(LoopActor):
    """Judges slots in turn. ``remembers``: the configured state store keeps what it learns."""

    def __init__(self, config: Config, remembers: bool = False) -> None:
        super().__init__(config.observability)
        self._config, self._remembers = config, remembers
        policy = config.router.policy
        parameters = policy.parameters if policy.kind == "chain" else {}
        self._chains = ModelChains(**parameters)
        self._slots: Queue[tuple[ChainSlot, Future[Mapping[str, Chain]]] | None] = Queue(MAX_SLOTS)
        self._busy_since_s: float | None = None

    def _start_loop(self) -> LoopThread:
        memory = None
        if self._remembers:
            state = self._config.cluster
            memory = RouterMemory(open_store(state.state, state.namespace), self._config, "chain")
        return LoopThread("chains", lambda stop: self._run(stop, memory), lambda: self._slots.put(None))

    def _run(self, stop: Event, memory: RouterMemory | None) -> None:
        if memory is not None:
            memory.recall(self._chains)
        while not stop.is_set() and (asked := self._slots.get()) is not None:
            slot, answer = asked
            self._busy_since_s = time.monotonic()
            self._chains.observe(slot.observations, slot.scores, slot.levels)
            answer.set_result(self._chains.assign(slot.requests, slot.pool))
            self._busy_since_s = None
            if memory is not None:
                memory.save(self._chains, time.monotonic())
        if memory is not None:
            memory.close()

    def judge(self, slot: ChainSlot) -> Mapping[str, Chain] | None:
        """The chains of the requests; None where it is too late, or too many slots wait."""
        answer: Future[Mapping[str, Chain]] = Future()
        try:
            self._slots.put((slot, answer), timeout=ANSWER_S)
            return answer.result(ANSWER_S)
        except (Full, TimeoutError):
            return None

    def stalled_s(self) -> float:
        """Seconds that the slot under way has taken."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def report(self) -> tuple[ChainStatus, ...]:
        """The fastest candidate chains, by T_eff in the last slot with requests."""
        fastest = sorted(self._chains.per_token_s.items(), key=lambda item: item[1])[:NUM_REPORTED]
        return tuple([ChainStatus(chain, 1e3 * seconds, self._chains.scores(chain)) for chain, seconds in fastest])


class Chains(Protocol):
    """The router's access to the scheduler."""

    def tell(self, slot: ChainSlot) -> None:
        """Without waiting; not while an earlier slot is under way."""

    def ask(self, slot: ChainSlot) -> Mapping[str, Chain] | None:
        """As `ModelChainScheduler.judge`; None also where there is none now."""


class BesideChains:
    """A policy whose slots the scheduler is told; without one of its own, the chains that the scheduler decided."""

    def __init__(self, chains: Chains, policy: AssignmentPolicy | None) -> None:
        self._chains, self._policy = chains, policy
        self._news = ChainSlot()

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        self._news = ChainSlot(observations, scores, levels)
        if self._policy is not None:
            self._policy.observe(observations, scores, levels)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        slot, self._news = replace(self._news, requests=requests, pool=pool), ChainSlot()
        if self._policy is not None:
            self._chains.tell(slot)
            return self._policy.assign(requests, pool)
        decided = self._chains.ask(slot) or {}
        are_open = {member.name for member in pool if member.is_open}.issuperset
        kept = {request.request_id: request.chain if are_open(request.chain) else TARGET_ONLY for request in requests}
        return {request_id: decided.get(request_id, chain) for request_id, chain in kept.items()}

    def snapshot(self) -> JsonValue:
        """None: the scheduler keeps its own."""
        return self._policy.snapshot() if self._policy is not None else None

    def restore(self, snapshot: JsonValue) -> None:
        if self._policy is not None:
            self._policy.restore(snapshot)


def beside(chains: Chains, config: PolicyConfig) -> AssignmentPolicy:
    """The configured policy in a cluster with a scheduler of chains."""
    return BesideChains(chains, None if config.kind == "chain" else build_policy(config))
