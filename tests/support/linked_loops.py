"""A target's loop with a gateway and drafters over links in memory, which a test steps on a clock that it moves."""

from collections.abc import Callable

from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport.base import Link, Mailbox, Received
from cluster.transport.memory import LocalNetwork
from cluster.types import Commit, ModelInfo, Request, RoutingTable
from drafters.loop import DrafterLoop
from drafters.protocol import Drafter
from drafters.sessions import SessionLimits
from engine.round import DrafterPool, Policies, TargetLoop
from engine.target import TargetEngine
from router.cost_model import CostModel
from router.drafting.length import DraftLengths
from router.planning.planner import Planner, StepPlanner
from tests.support.toys import MODEL

ADDRESS = "memory://t"


class HandClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LinkedTarget:
    """``drafter`` drafts for all requests; without one none is drafted for."""

    def __init__(
        self,
        engine: TargetEngine,
        cost: CostModel,
        planner: Planner | None = None,
        lengths: DraftLengths | None = None,
        *,
        drafter: str | None = None,
        colocated: tuple[str, ...] = (),
        model: ModelInfo = MODEL,
        clock: Callable[[], float] | None = None,
        inbox: Mailbox | None = None,
    ) -> None:
        self.clock, self.inbox = HandClock(), inbox or Mailbox()
        policies = Policies(planner or StepPlanner(), lengths or DraftLengths())
        pool = DrafterPool(RoutingTable(0, defaults=((drafter,) if drafter else (),)), colocated)
        self.loop = TargetLoop(engine, model, Mailbox(), cost, clock or self.clock, policies, pool)
        self._network, self._model = LocalNetwork(), model
        self._network.listen(ADDRESS, self.loop.mailbox, self._hello(Role.TARGET, "t"))
        self.gateway = self._network.connect(ADDRESS, self.inbox, self._hello(Role.GATEWAY, "g"))

    def link_drafter(self, name: str, mailbox: Mailbox) -> Link:
        return self._network.connect(ADDRESS, mailbox, self._hello(Role.DRAFTER, name))

    def drafter_loop(self, name: str, drafter: Drafter, spare_share: float = 1.0, **limits: int) -> DrafterLoop:
        mailbox = Mailbox()
        self.link_drafter(name, mailbox)
        return DrafterLoop(name, drafter, mailbox, SessionLimits(**limits), spare_share=spare_share)

    def submit(self, *requests: Request) -> None:
        self.gateway.send(SubmitRound(requests))

    def commits(self) -> list[Commit]:
        """What the gateway was sent since the last call."""
        messages = [event.message for event in self.inbox.drain() if isinstance(event, Received)]
        return [commit for message in messages if isinstance(message, CommitRound) for commit in message.commits]

    def _hello(self, role: Role, name: str) -> Hello:
        return Hello(role, name, self._model.vocab_size, self._model.tokenizer_fingerprint)
