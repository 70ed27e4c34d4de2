"""The live loops of a target and its drafters on fake engines, in the virtual time of a simulation.

Each has a thread of its own, of which one runs at a time.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cluster.messages import CommitRound, Hello, Message, Role, SubmitRound
from cluster.transport.base import LinkUp, Mailbox, Received
from cluster.types import ModelInfo, Request, SamplingParams
from drafters.loop import DrafterLoop
from drafters.protocol import Capabilities, Demand, Draft
from drafters.sessions import SessionLimits
from engine.round import TargetLoop
from engine.target import SpanInput, SpanOutcome
from router.assignment import AssignmentPolicy
from router.draft_length import DraftLengths
from router.estimates.drift import DriftDetector
from router.plan import Capacity, StepPlan
from router.planner import Planner
from router.slot import SlotReport, build_router
from simulator.agreement import SimulatedRequest
from simulator.simulation import ClusterSpec, DrafterSpec
from simulator.timing import Work

VOCAB_SIZE = 50
EOS = 0
MAIL, STEP = 0, 1


def truth(number: int, position: int, output_len: int, max_tokens: int) -> int:
    """Token of an answer: never EOS but at the end of one that ends before it must."""
    if position == output_len - 1 < max_tokens - 1:
        return EOS
    return 1 + (7 * number + 13 * position) % (VOCAB_SIZE - 2)


@dataclass(eq=False)
class Actor:
    """A loop in its thread."""

    mailbox: Mailbox
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    idle: bool = False  # waits for mail
    called: bool = False  # is to run at this time


class World:
    """Virtual time, in which mail comes before whoever reads it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._num = 0
        self._back = threading.Semaphore(0)
        self._over = False
        self._threads: list[tuple[Actor, threading.Thread]] = []
        self.error: BaseException | None = None

    def at(self, time_s: float, kind: int, action: Callable[[], None]) -> None:
        self._num += 1
        heappush(self._heap, (max(time_s, self.now_s), kind, self._num, action))

    def start(self, actor: Actor, body: Callable[[], None]) -> None:
        def run() -> None:
            actor.turn.acquire()
            try:
                if not self._over:
                    body()
            except _Over:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again by the thread of the test
                self.error = error
            self._back.release()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append((actor, thread))
        self.at(0.0, STEP, lambda: self._resume(actor))

    def sleep(self, actor: Actor, seconds: float) -> None:
        """In the actor's thread."""
        self.at(self.now_s + seconds, STEP, lambda: self._resume(actor))
        self._yield(actor)

    def wait(self, actor: Actor, wake_s: float | None) -> None:
        """In the actor's thread: until mail comes, or the time."""
        actor.idle = True
        if wake_s is not None:
            self.at(wake_s, STEP, lambda: self.call(actor))
        self._yield(actor)

    def deliver(self, actor: Actor, event: LinkUp | Received) -> None:
        actor.mailbox.put(event)
        self.call(actor)

    def call(self, actor: Actor) -> None:
        if actor.idle and not actor.called:
            actor.called = True
            self.at(self.now_s, STEP, lambda: self._resume(actor))

    def run(self, until: Callable[[], bool]) -> None:
        while self._heap and not until():
            self.now_s, _, _, action = heappop(self._heap)
            action()
            if self.error is not None:
                break
        self._over = True
        for actor, thread in self._threads:
            actor.turn.release()
            thread.join(10.0)
        if self.error is not None:
            raise self.error

    def _resume(self, actor: Actor) -> None:
        actor.idle = actor.called = False
        actor.turn.release()
        self._back.acquire()

    def _yield(self, actor: Actor) -> None:
        self._back.release()
        actor.turn.acquire()
        if self._over:
            raise _Over


class _Over(BaseException):
    """The run has ended."""


@dataclass(eq=False)
class Wire:
    """One end of a link; what is sent comes to the other end a latency later."""

    world: World
    peer: Hello
    owner: Actor
    latency_s: float
    other: "Wire | None" = None

    def send(self, message: Message) -> None:
        other = self.other
        assert other is not None
        event = Received(other, message)
        self.world.at(self.world.now_s + self.latency_s, MAIL, lambda: self.world.deliver(other.owner, event))

    def close(self) -> None:
        raise AssertionError("a link was closed")


class FakeTarget:
    """A TargetEngine whose answers are known beforehand, and whose passes take what the simulation says."""

    def __init__(self, world: World, actor: Actor, spec: ClusterSpec, requests: Mapping[str, tuple[int, SimulatedRequest]]):
        self._world, self._actor, self._spec, self._requests = world, actor, spec, requests
        self._computed: dict[str, int] = {}

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        self._computed[request.id] = 0
        return 0

    def execute(self, spans: Sequence[SpanInput]) -> list[SpanOutcome]:
        decoding, prefilling, outcomes = [], [], []
        for span in spans:
            number, request = self._requests[span.request_id]
            num_known = len(span.token_ids) - span.num_drafts
            (decoding if num_known == 1 else prefilling).append((len(span.token_ids), span.base_len + num_known))
            if not span.samples:
                self._computed[span.request_id] = span.base_len + num_known
                outcomes.append(SpanOutcome(span.request_id, (), 0))
                continue
            position = span.base_len + num_known - request.prompt_len
            drafts = span.token_ids[num_known:]
            chosen: list[int] = []
            for i in range(len(drafts) + 1):
                chosen.append(truth(number, position + i, request.output_len, request.max_tokens))
                if i == len(drafts) or chosen[-1] != drafts[i]:
                    break
            # As the round will cut them: at the end of the answer.
            num_kept = min(len(chosen), request.output_len - position)
            self._computed[span.request_id] = request.prompt_len + position + num_kept - 1
            outcomes.append(SpanOutcome(span.request_id, tuple(chosen), len(chosen) - 1))
        self._world.sleep(self._actor, self._spec.pass_timer.seconds(decoding, prefilling))
        return outcomes

    def release(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def capacity(self) -> Capacity:
        limits = self._spec.limits
        num_held = sum(-(-n // limits.block_len) for n in self._computed.values())
        return Capacity(
            limits.block_len,
            limits.num_blocks,
            limits.num_blocks - num_held,
            limits.max_num_sequences,
            limits.max_pass_tokens,
            limits.max_model_len,
        )

    def check_integrity(self) -> None: ...


class FakeDrafter:
    """Proposes what the agreement says, in the time that the simulation says."""

    capabilities = Capabilities()

    def __init__(
        self, world: World, actor: Actor, name: str, spec: ClusterSpec, requests: Mapping[str, tuple[int, SimulatedRequest]]
    ):
        self._world, self._actor, self._name, self._spec, self._requests = world, actor, name, spec, requests
        self._tokens: dict[str, list[int]] = {}

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._tokens[request_id] = list(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._tokens[request_id].extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts, works = [], []
        for demand in demands:
            number, request = self._requests[demand.request_id.partition("/")[2]]
            start = len(self._tokens[demand.request_id]) - request.prompt_len
            position = start + len(demand.ahead)

            def says(at: int, number: int = number, request: SimulatedRequest = request) -> int:
                return truth(number, at, request.output_len, request.max_tokens)

            is_right = all(token == says(start + i) for i, token in enumerate(demand.ahead))
            agreement = request.answer.of(self._name)
            num, right, confidences = agreement.draft(position, demand.num_tokens, is_right)
            tokens = [says(position + i) if i < right else 1 + says(position + i) % (VOCAB_SIZE - 1) for i in range(num)]
            drafts.append(Draft(demand.request_id, tuple(tokens), confidences))
            works.append(Work(request, position, demand.num_tokens, num, 0))
        self._world.sleep(self._actor, self._spec.draft_timer.seconds(self._name, works))
        return drafts

    def release(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)

    def check_integrity(self) -> None: ...


class Noting:
    """A planner whose plans are kept."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.plans: list[tuple[float, StepPlan]] = []

    def plan(self, sequences, drafters, capacity, cost, now_s):  # type: ignore[no-untyped-def]
        plan = self._planner.plan(sequences, drafters, capacity, cost, now_s)
        self.plans.append((now_s, plan))
        return plan


def run_live(
    spec: ClusterSpec, policy: AssignmentPolicy, requests: Sequence[SimulatedRequest]
) -> tuple[list[tuple[float, StepPlan]], dict[str, int]]:
    """All plans of one target, and the tokens that each request got."""
    world = World()
    known = {request.id: (number, request) for number, request in enumerate(requests)}
    model = ModelInfo("fake", VOCAB_SIZE, spec.limits.max_model_len, (EOS,), "fake")
    target = Actor(Mailbox())
    gateway = Actor(Mailbox())
    gateway.called = True  # nobody runs it
    planner = Noting(spec.planner())
    watch = None if spec.collapse is None else DriftDetector(spec.collapse, spec.slot_s)
    router = build_router(policy, spec.pool(), watch)
    engine = FakeTarget(world, target, spec, known)
    loop = TargetLoop(
        engine,
        model,
        target.mailbox,
        spec.cost,
        lambda: world.now_s,
        planner,
        router.first_table(),
        spec.limits.max_waiting,
        DraftLengths({drafter.name: drafter.max_draft_len for drafter in spec.drafters}),
    )

    def hello(role: Role, name: str) -> Hello:
        return Hello(role, name, VOCAB_SIZE, "fake")

    def link(actor: Actor, role: Role, name: str, latency_s: float) -> Wire:
        """The other end of which is the target's; both are up at once."""
        there = Wire(world, hello(role, name), target, latency_s)
        here = Wire(world, hello(Role.TARGET, "target"), actor, latency_s, there)
        there.other = here
        target.mailbox.put(LinkUp(there))
        actor.mailbox.put(LinkUp(here))
        return here

    def serve() -> None:
        while True:
            report = loop.step(world.now_s)
            if not report.executed:
                world.wait(target, report.wake_s)

    def drafting(drafter: DrafterSpec) -> None:
        actor = Actor(Mailbox())
        limits = SessionLimits(capacity=drafter.capacity, max_draft_len=drafter.max_draft_len)
        fake = FakeDrafter(world, actor, drafter.name, spec, known)
        drafter_loop = DrafterLoop(drafter.name, fake, actor.mailbox, limits, ahead_len=drafter.ahead_len)
        link(actor, Role.DRAFTER, drafter.name, spec.link_s)

        def draft() -> None:
            while True:
                if not drafter_loop.step(world.now_s):
                    world.wait(actor, None)

        world.start(actor, draft)

    def arrive(request: SimulatedRequest) -> Callable[[], None]:
        sampling = SamplingParams(request.max_tokens, temperature=0.0)
        submitted = Request(request.id, (1,) * request.prompt_len, sampling, request.arrival_s, chain=request.chain)
        return lambda: world.deliver(target, Received(there, SubmitRound(submits=(submitted,))))

    names = tuple(drafter.name for drafter in spec.drafters)

    def slot() -> None:
        report = SlotReport(loop.requests(), loop.take_observations(), loop.status().table_version, names)
        table = router.slot([report])
        if table is not None:
            loop.publish_table(table)
            world.call(target)
        world.at(world.now_s + spec.slot_s, STEP, slot)

    here = link(gateway, Role.GATEWAY, "api", 0.0)
    there = here.other
    assert there is not None
    world.start(target, serve)
    for drafter in spec.drafters:
        drafting(drafter)
    for request in requests:
        world.at(request.arrival_s, MAIL, arrive(request))
    world.at(spec.slot_s, STEP, slot)
    tokens = dict.fromkeys(known, 0)
    ended: set[str] = set()

    def all_ended() -> bool:
        for event in gateway.mailbox.drain():
            if isinstance(event, Received) and isinstance(event.message, CommitRound):
                for commit in event.message.commits:
                    tokens[commit.request_id] += len(commit.token_ids)
                    if commit.finish is not None:
                        ended.add(commit.request_id)
        return len(ended) == len(requests)

    world.run(all_ended)
    return planner.plans, tokens
