"""The target's loop under proposals of any length: no round raises, and tokens are as decoded plainly.

Drafters send up to 300 tokens, right and wrong, in time and late; grammars of every kind force long texts; outputs are
predicted, rightly or not; requests are aborted amid. Policies, engine options and traffic are drawn by seed."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from pydantic import TypeAdapter

from cluster.config import DraftLengthConfig
from cluster.counts import Attainment, DraftingTally, Histogram
from cluster.messages import CommitRound, DraftScore, DraftTiming, Hello, Message, ProposalRound, Role, SubmitRound
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.spans import FinishedSpan
from cluster.transport.base import LinkUp, Mailbox, Received
from cluster.types import FORCED, MAX_DRAFT_LEN, PREDICTION, FinishReason, ModelInfo, Proposal, Request, RoutingTable, Slo
from engine.admission import AdmissionRules
from engine.colocated import ColocatedDrafters
from engine.early_exit import EarlyExit
from engine.factory import load_target
from engine.native import NativeTarget
from engine.pass_costs import DraftingMonitor, PassCosts, PassCounts
from engine.request_spans import RequestSpans
from engine.round import DrafterPool, Policies, TargetLoop
from engine.slo_monitor import SloMonitor
from engine.telemetry import Telemetry
from profiler.online_cost import OnlineCost
from router.assignment import Positions
from router.cost_model import TableCost
from router.drafting.colocated_gate import ColocatedGate
from router.drafting.length import DraftLengths
from router.drafting.policies import DRAFT_LENGTHS, OVERLAP_POLICIES, VERIFICATION_POLICIES, build_draft_lengths
from router.drafting.value import DecodeRate
from router.estimates.drafter_stats import DictatedDrafts, DrafterStats
from router.estimates.survival import OnlineSurvival
from router.planning.admission import Departures
from router.planning.planner import PlannerSettings, StepPlanner

EOS = 256
MODEL = ModelInfo("tiny", EOS + 1, 512, (EOS,), "tiny")
COST = TableCost((1, 64), (0.02, 0.03), 1e-6)
LONGEST = 300  # tokens that a drafter sends
LETTERS = "a b c d e " * 15
LONG_NAME = "a_property_with_quite_a_long_name_" * 4
SCHEMA = {"type": "object", "properties": {LONG_NAME: {"enum": [LETTERS, "no"]}}, "required": [LONG_NAME]}
CALL = {
    "type": "tag",
    "begin": f'{{"name": "{LONG_NAME}", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "}",
}
DRAFT_LENGTH_CONFIGS: list[DraftLengthConfig] = [
    TypeAdapter(DraftLengthConfig).validate_python({"kind": kind}) for kind in sorted(DRAFT_LENGTHS)
]
GRAMMARS = (
    Grammar(GrammarKind.EBNF, f'root ::= "{LETTERS}"'),
    None,
    Grammar(GrammarKind.REGEX, "(a b c d e ){15}"),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": CALL})),
    Grammar(GrammarKind.EBNF, 'root ::= "yes, " [a-z]+ ", really" | "no"'),
)

# What a round measures with, traces with and learns by; and of their methods those that it cannot do without.
OBSERVERS: tuple[type[Any], ...] = (
    *(Telemetry, DrafterStats, DictatedDrafts, DraftingTally, OnlineSurvival, Histogram, Positions),
    *(SloMonitor, Attainment, Departures, RequestSpans, PassCosts, PassCounts, DraftingMonitor, DecodeRate),
    *(ColocatedDrafters, ColocatedGate, *{type(build_draft_lengths(one, {})) for one in DRAFT_LENGTH_CONFIGS}, DraftLengths),
)
DECIDING = {"num_failed_observations", "refusal", "is_queried", "shares_device"}


@dataclass(eq=False)
class Peer:
    """The target's end of a link."""

    peer: Hello
    sent: list[Message] = field(default_factory=list)
    is_closed: bool = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Spans:
    num: int = 0

    def add(self, span: FinishedSpan) -> None:
        self.num += 1

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def engine(tiny_model_folder: Path) -> Iterator[NativeTarget]:
    target = load_target(tiny_model_folder, dtype="float32", kv_cache_bytes=2**21, max_model_len=512)
    assert isinstance(target, NativeTarget)
    assert target.grammars is not None
    for grammar in filter(None, GRAMMARS):
        target.grammars.compile(grammar)
    yield target
    target.exit_early(None)
    target.check_integrity()


class Fuzz:
    """One loop, stepped on a virtual clock, with a gateway and two drafters: "near" may be on the target's device."""

    def __init__(self, engine: NativeTarget, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.mailbox = Mailbox()
        settings = PlannerSettings(
            rng.choice(sorted(VERIFICATION_POLICIES)), rng.choice((0.0, 0.05)), 64, rng.choice(sorted(OVERLAP_POLICIES))
        )
        length = rng.choice(DRAFT_LENGTH_CONFIGS)
        engine.exit_early(EarlyExit(engine.model, COST, engine.embedding) if rng.random() < 0.4 else None)
        colocated = rng.choice(((), ("near",)))
        self.loop = TargetLoop(
            engine,
            MODEL,
            self.mailbox,
            OnlineCost(COST) if rng.random() < 0.5 else COST,
            self._clock,
            Policies(StepPlanner(settings), build_draft_lengths(length, {"far": 64, "near": 8})),
            DrafterPool(RoutingTable(0, defaults=(("far",), ("near",)), scorers=("far",)), colocated),
            AdmissionRules(grammars=engine.grammars),
        )
        self.loop._deferred._is_asynchronous = True  # as on a GPU
        self.spans = Spans()
        self.loop.observer.spans = RequestSpans(self.spans, "target")
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason | None] = {}
        self.prompt_lens: dict[str, int] = {}
        self.lens: set[int] = set()  # of the proposals sent
        self.verified: list[tuple[str | None, int]] = []  # drafter and draft tokens of each commit
        self.gateway = self._link(Role.GATEWAY, "api")
        self.links = {name: self._link(Role.DRAFTER, name) for name in ("far", "near")}

    def submit(self, request: Request) -> None:
        self.outputs[request.id], self.ends[request.id] = [], None
        self.prompt_lens[request.id] = len(request.prompt_token_ids)
        self._put(self.gateway, SubmitRound(submits=(request,)))

    def abort(self, request_id: str) -> None:
        self._put(self.gateway, SubmitRound(aborts=(request_id,)))

    def step(self) -> None:
        self.loop.step(self.now_s)
        self.now_s += 0.001
        for message in self.gateway.sent:
            assert isinstance(message, CommitRound)
            for commit in message.commits:
                assert commit.error is None, commit.error
                self.outputs[commit.request_id].extend(commit.token_ids)
                self.ends[commit.request_id] = commit.finish
                self.verified.append((commit.drafter, commit.num_proposed))
        self.gateway.sent.clear()

    def propose(self, name: str, truths: dict[str, tuple[int, ...]]) -> None:
        """Proposals of any length for live requests: some are right for a while, some late, some unsound."""
        rng, link = self.rng, self.links[name]
        if link.is_closed:  # it sent too much that was unsound
            link = self.links[name] = self._link(Role.DRAFTER, name)
        proposals, scores = [], []
        for request_id, output in self.outputs.items():
            if self.ends[request_id] is not None or rng.random() < 0.3:
                continue
            lag = rng.choice((0, 0, 0, 1, 2)) if len(output) > 2 else 0
            done = len(output) - lag
            num = rng.choice((0, rng.randint(1, 8), rng.randint(1, MAX_DRAFT_LEN), MAX_DRAFT_LEN, rng.randint(1, LONGEST)))
            if num > MAX_DRAFT_LEN and rng.random() < 0.7:
                num = MAX_DRAFT_LEN  # few are unsound, or the link would be closed at once
            right = list(truths[request_id][done : done + rng.choice((0, rng.randint(0, num)))])
            token_ids = (*right, *(rng.randrange(EOS + 1) for _ in range(num - len(right))))
            confidences = tuple(rng.choice((0.0, 0.5, rng.random(), 1.0)) for _ in token_ids)
            base_len = self.prompt_lens[request_id] + done
            proposal = Proposal(request_id, base_len, token_ids, confidences, name, rng.random() < 0.2)
            proposals += [proposal] * rng.choice((1, 1, 1, 2))
            num_scored = rng.randint(0, min(done, MAX_DRAFT_LEN))
            scores.append(DraftScore(request_id, self.prompt_lens[request_id], num_scored, max(0, num_scored - 1)))
            self.lens.add(num)
        timings = (DraftTiming(max(1, len(proposals)), rng.choice((1e-9, 0.01, 3000.0))),)
        resyncs = tuple(rng.sample(sorted(self.outputs), min(1, len(self.outputs)))) if rng.random() < 0.1 else ()
        self._put(link, ProposalRound(0, tuple(proposals), timings=timings, scores=tuple(scores), resyncs=resyncs))

    @property
    def live(self) -> list[str]:
        return [request_id for request_id, end in self.ends.items() if end is None]

    def _clock(self) -> float:
        self.now_s += self.rng.choice((0.0, 1e-9, 0.02, 0.05, 5.0))
        return self.now_s

    def _link(self, role: Role, name: str) -> Peer:
        link = Peer(Hello(role, name, MODEL.vocab_size, MODEL.tokenizer_fingerprint))
        self.mailbox.put(LinkUp(link))
        return link

    def _put(self, link: Peer, message: Message) -> None:
        self.mailbox.put(Received(link, message))


def make_requests(num: int) -> list[Request]:
    rng = random.Random(0)
    made = []
    for i in range(num):
        parameters: dict[str, Any] = rng.choice(
            ({}, {"top_logprobs": 1}, {"stop_token_ids": (ord("d"),)}, {"ignore_eos": True}, {"repetition_penalty": 1.2})
        )
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, 40, 160, 160)),
            temperature=rng.choice((0.0, 1.0)),
            seed=i,
            grammar=GRAMMARS[i % len(GRAMMARS)],
            **parameters,
        )
        slo = Slo(None, rng.choice((None, 1e-9, 0.05, 10.0)), "quick")
        prompt = tuple(rng.randrange(EOS) for _ in range(rng.randint(1, 40)))
        made.append(Request(f"r{i}", prompt, sampling, 0.0, slo, trace=f"00-{i + 1:032x}-{i + 1:016x}-01"))
    return made


REQUESTS = make_requests(3 * len(GRAMMARS))


@pytest.fixture(scope="module")
def truths(engine: NativeTarget) -> dict[str, tuple[int, ...]]:
    """What plain decoding yields."""
    fuzz = Fuzz(engine, 0)
    engine.exit_early(None)
    for one in REQUESTS:
        fuzz.submit(replace(one, chain=()))
    while fuzz.live:
        fuzz.step()
    assert {drafter for drafter, _ in fuzz.verified} == {None}
    return {request_id: tuple(output) for request_id, output in fuzz.outputs.items()}


def predicted(truth: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Right, or with other tokens, too few or too many, or none."""
    token_ids = list(truth) + [rng.randrange(EOS + 1) for _ in range(rng.choice((0, 0, LONGEST)))]
    for _ in range(rng.choice((0, 1, 5, 50))):
        at = rng.randint(0, len(token_ids))
        token_ids[at : at + rng.choice((0, 1, 9))] = [rng.randrange(EOS + 1) for _ in range(rng.choice((0, 1, 9)))]
    return tuple(token_ids) if rng.random() < 0.7 else ()


def run(engine: NativeTarget, truths: dict[str, tuple[int, ...]], seed: int, *, fails: bool = False) -> Fuzz:
    rng = random.Random(seed)
    fuzz, waiting, aborted = Fuzz(engine, seed), rng.sample(REQUESTS, len(GRAMMARS)), set[str]()
    while waiting or fuzz.live:
        while waiting and rng.random() < 0.3:
            asked = waiting.pop()
            fuzz.submit(replace(asked, prediction_token_ids=predicted(truths[asked.id], rng)))
        if fuzz.live and rng.random() < 0.02:
            aborted.add(gone := rng.choice(fuzz.live))
            fuzz.abort(gone)
            fuzz.ends[gone] = FinishReason.ABORT
        for name in ("far", "near"):
            if rng.random() < 0.7:
                fuzz.propose(name, truths)
        fuzz.step()
    fuzz.step()
    for request_id, output in fuzz.outputs.items():
        expected = truths[request_id]
        assert tuple(output) == (expected[: len(output)] if request_id in aborted else expected), request_id
    assert fuzz.loop.status().num_running == fuzz.loop.status().num_waiting == 0
    assert max(num for _, num in fuzz.verified) <= MAX_DRAFT_LEN
    assert bool(fuzz.loop.telemetry.num_failed_observations) == fails
    assert fails or not fuzz.loop.telemetry._committed_s, "nothing is kept of requests that ended"
    return fuzz


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.slow
def test_no_proposal_ends_a_round_or_changes_a_token(
    engine: NativeTarget, truths: dict[str, tuple[int, ...]], seeds: range
) -> None:
    found = []
    for seed in seeds:
        try:
            found.append(run(engine, truths, seed))
        except Exception as error:
            raise AssertionError(f"seed {seed} fails") from error
    assert {num > MAX_DRAFT_LEN for fuzz in found for num in fuzz.lens} == {True, False}
    assert {drafter for fuzz in found for drafter, num in fuzz.verified if num} == {"far", "near", FORCED, PREDICTION}
    assert any(fuzz.spans.num for fuzz in found)


def test_no_failing_observation_ends_a_round_or_changes_a_token(
    engine: NativeTarget, truths: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every public method fails, of whatever measures, traces or learns."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nothing was counted")

    for observer in OBSERVERS:
        for name, method in tuple(vars(observer).items()):
            if not name.startswith("_") and name not in DECIDING:
                if isinstance(method, FunctionType):
                    monkeypatch.setattr(observer, name, fail)
                elif isinstance(method, property):
                    monkeypatch.setattr(observer, name, property(fail))
    for seed in range(3):
        run(engine, truths, seed, fails=True)
