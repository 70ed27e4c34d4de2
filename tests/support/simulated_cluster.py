"""A whole cluster stepped by one thread on a virtual clock: target round, drafter loops, router, a gateway, and faults.

Everything random comes from one seed, so a failing seed replays: ``run(seed)``."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Event, LinkDown, LinkUp, Mailbox, Received
from cluster.transport.memory import LocalNetwork, MemoryLink
from cluster.types import Commit, DraftTerms, FinishReason, Request, RoutingTable
from drafters.loop import DrafterLoop
from engine.admission import AdmissionRules
from engine.round import Policies, TargetLoop
from router.cost_model import TableCost
from router.drafting.length import DraftLengths
from router.drafting.policies import VERIFICATION_POLICIES
from router.drafting.value import DraftingValue
from router.plan import SequenceView
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.simulated_network import Faults, MemoryNetwork
from tests.support.toys import MODEL, VOCAB_SIZE, ToyDrafter, ToyTarget

TARGET = "memory://target"
GATEWAY = "memory://gateway"
MAX_TURNS = 20_000


class _DrafterMailbox(Mailbox):
    """``is_down``: a LinkDown waits in it."""

    is_down = False

    def put(self, event: Event, on_room: Callable[[], None] | None = None) -> bool:
        self.is_down |= isinstance(event, LinkDown)
        return super().put(event, on_room)

    def drain(self) -> list[Event]:
        self.is_down = False
        return super().drain()


@dataclass
class SimulatedDrafter:
    name: str
    drafter: ToyDrafter
    loop: DrafterLoop
    mailbox: _DrafterMailbox
    link: MemoryLink
    hung_until_s: float = 0.0


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    num_proposed: int = 0
    num_accepted: int = 0


class RandomBudgets(DraftLengths):
    """Draft lengths and row prices that change at random times."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._last: dict[str, DraftTerms] = {}

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        rng, last = self._rng, self._last
        self._last = {
            s.request_id: last[s.request_id]
            if s.request_id in last and rng.random() < 0.9
            else DraftTerms(rng.randint(1, 8), rng.random())
            for s in sequences
            if s.drafter is not None
        }
        return self._last


class SimulatedCluster:
    """Steps its parts in random order. ``faults`` affect the links of drafters; crashes and hangs the drafters."""

    def __init__(self, seed: int, faults: Faults, crash: float, hang: float, num_drafters: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.now_s = 0.0
        self.crash, self.hang = crash, hang
        self.network = MemoryNetwork(random.Random(rng.random()), faults)
        self.local = LocalNetwork()
        self.engine = ToyTarget(
            num_blocks=rng.choice((19, 24, 64)),
            max_num_sequences=rng.choice((2, 4, 8)),
            max_pass_tokens=rng.choice((12, 24, 48)),
            prefix_cache=rng.random() < 0.7,
        )
        self.mailbox = Mailbox(capacity=rng.choice((4, 64)))
        own = Hello(Role.TARGET, "target", VOCAB_SIZE, MODEL.tokenizer_fingerprint)
        self.network.listen(TARGET, self.mailbox, own)
        self.local.listen(GATEWAY, self.mailbox, own)
        self.gateway_mailbox = Mailbox()
        self.gateway = self.local.connect(
            GATEWAY, self.gateway_mailbox, Hello(Role.GATEWAY, "api", VOCAB_SIZE, MODEL.tokenizer_fingerprint)
        )
        settings = PlannerSettings(
            verification=rng.choice(sorted(VERIFICATION_POLICIES)),
            max_hold_s=rng.choice((0.0, 0.02, 0.2, 0.2)),
            max_chunk_len=rng.choice((4, 16)),
        )
        cost = TableCost((1, 8, 32), (0.02, 0.025, rng.choice((0.03, 0.1))), 1e-6)
        self.loop = TargetLoop(
            self.engine,
            MODEL,
            self.mailbox,
            cost,
            self._after_pass,
            Policies(StepPlanner(settings), RandomBudgets(rng)),
            rules=AdmissionRules(max_waiting=64),
        )
        self.names = [f"toy-{i}" for i in range(num_drafters)]
        self.drafters = {name: self._start_drafter(name) for name in self.names}
        self.outcomes: dict[str, Outcome] = {}
        self.aborted: set[str] = set()
        self.version = 0
        self._route()

    def submit(self, request: Request) -> None:
        self.outcomes[request.id] = Outcome()
        self.gateway.send(SubmitRound(submits=(request,)))

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.gateway.send(SubmitRound(aborts=(request_id,)))

    @property
    def unfinished(self) -> list[str]:
        return [k for k, v in self.outcomes.items() if v.finish is None and k not in self.aborted]

    def turn(self) -> None:
        """Steps every part once, in random order, then moves time to the next event."""
        progressed = False
        wake_s: list[float] = []
        parts: list[SimulatedDrafter | None] = [None, *self.drafters.values()]
        self.rng.shuffle(parts)
        for part in parts:
            if part is None:
                report = self.loop.step(self.now_s)
                progressed |= report.executed
                if report.wake_s is not None:
                    wake_s.append(report.wake_s)
            else:
                progressed |= self._step_drafter(part, wake_s)
            progressed |= self.network.deliver_until(self.now_s) > 0
        self._hear()
        if self.rng.random() < 0.02:
            self._route()
        if not progressed:
            due = [t for t in (self.network.next_due_s, *wake_s) if t is not None]
            self.now_s = max(self.now_s + 1e-6, min(due, default=self.now_s + 0.01))
            self.network.deliver_until(self.now_s)

    def run_until_finished(self) -> None:
        for _ in range(MAX_TURNS):
            if not self.unfinished:
                assert self.loop.telemetry.num_failed_observations == 0, "num_failed_observations"
                return
            self.turn()
        raise AssertionError(f"no end after {MAX_TURNS} turns; unfinished: {self.unfinished}")

    def heal_and_settle(self) -> None:
        """Ends all faults and lets enough time pass for every retry and silence limit."""
        self.network.faults = Faults()
        self.crash = self.hang = 0.0
        end_s = self.now_s + 300.0
        for _ in range(MAX_TURNS):
            if self.now_s > end_s or not any(d.drafter.num_followed for d in self.drafters.values()):
                break
            self.turn()
        self.loop.step(self.now_s)

    def _after_pass(self) -> float:
        """The round reads the clock at the start and the end of a pass."""
        self.now_s += self.rng.uniform(0.001, 0.05)
        return self.now_s

    def _step_drafter(self, part: SimulatedDrafter, wake_s: list[float]) -> bool:
        if self.now_s < part.hung_until_s:
            wake_s.append(part.hung_until_s)
            return False
        if self.rng.random() < self.crash:
            part.link.close()
            self.drafters[part.name] = self._start_drafter(part.name)
            return True
        if self.rng.random() < self.hang:
            part.hung_until_s = self.now_s + self.rng.uniform(0.01, 3.0)
            return True
        if part.mailbox.is_down:
            part.loop.step(self.now_s)
            part.link = self._connect(part.name, part.mailbox)
            return True
        progressed = part.loop.step(self.now_s)
        due_s = part.loop.next_due_s()
        if due_s is not None:
            wake_s.append(due_s)
        return progressed

    def _start_drafter(self, name: str) -> SimulatedDrafter:
        mailbox = _DrafterMailbox(capacity=self.rng.choice((4, 64)))
        drafter = ToyDrafter(random.Random(self.rng.random()), error=self.rng.choice((0.0, 0.1, 0.4, 1.0)), silence=0.1)
        loop = DrafterLoop(name, drafter, mailbox, ahead_len=self.rng.choice((0, 4)))
        return SimulatedDrafter(name, drafter, loop, mailbox, self._connect(name, mailbox))

    def _connect(self, name: str, mailbox: Mailbox) -> MemoryLink:
        return self.network.connect(TARGET, mailbox, Hello(Role.DRAFTER, name, VOCAB_SIZE, MODEL.tokenizer_fingerprint))

    def _route(self) -> None:
        """Routes at random, since no routing may change the output."""
        self.version += 1
        longer = [("nobody", self.names[0]), tuple(self.names), (self.names[-1], "nobody")] if self.names else []
        chains = [(), *((name,) for name in self.names), ("nobody",), *longer]
        self.loop.publish_table(
            RoutingTable(
                version=self.version,
                chains={k: self.rng.choice(chains) for k in self.outcomes if self.rng.random() < 0.5}
                if self.version > 1
                else {},
                defaults=tuple((name,) for name in self.names) or ((),),
                scorers=tuple(name for name in self.names if self.rng.random() < 0.5),
            )
        )

    def _hear(self) -> None:
        for event in self.gateway_mailbox.drain():
            match event:
                case Received(_, CommitRound(commits)):
                    for commit in commits:
                        self._note(commit)
                case LinkUp():
                    pass
                case other:
                    raise AssertionError(f"the gateway heard {other}")

    def _note(self, commit: Commit) -> None:
        outcome = self.outcomes[commit.request_id]
        assert outcome.finish is None, f"{commit.request_id} goes on after its end"
        outcome.token_ids.extend(commit.token_ids)
        outcome.finish = commit.finish
        outcome.num_proposed += commit.num_proposed
        outcome.num_accepted += commit.num_accepted
        assert 0 <= commit.num_accepted <= commit.num_proposed


def random_requests(rng: random.Random) -> list[Request]:
    shared = tuple(rng.randrange(VOCAB_SIZE) for _ in range(12))
    requests = []
    for i in range(rng.randint(1, 8)):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20)))
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(64),
            stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.8,
        )
        prompt = (*shared, *prompt) if rng.random() < 0.4 else prompt
        requests.append(Request(f"r{i}", prompt, sampling, arrival_s=i * 1e-3))
    return requests
