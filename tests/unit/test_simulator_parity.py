"""The simulator and replays against live loops: the rounds that they had, and what was accepted."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from benchmarks.record import agreement
from cluster.config import DrafterConfig, DraftLengthConfig, NgramOptions
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request, RoutingTable
from drafters.protocol import Drafter
from drafters.registry import Site, make, make_drafter
from drafters.replay import Recording, Round, replay
from engine.acceptance import common_prefix_len
from engine.factory import load_target
from engine.models.tokenizer import fingerprint
from engine.native import NativeTarget
from router.cost_model import TableCost
from router.drafter.seats import Fixed
from router.drafting.policies import build_draft_lengths
from router.plan import StepPlan
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.agreement import AgreementAnswer, SimulatedRequest
from simulator.recording import Recorder
from simulator.simulation import ClusterSpec, DrafterSpec, in_turn, simulate
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass
from tests.reference.suffix import SuffixDrafter
from tests.support.linked_loops import LinkedTarget
from tests.support.tiny_model import write_tiny_model
from tests.support.toys import MODEL, VOCAB_SIZE, ToyTarget, plain_run

DRAFT_LEN = 4
NUM_REQUESTS = 12  # all admitted at once: what is drafted on top of a draft is modelled coarsely
MAX_PASS_TOKENS = 512
Rounds = dict[str, list[int]]  # by request: draft tokens that each of its rounds verified


class Cost(TableCost):
    """Rows are free, so that no draft is cut short for its price."""

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        return 1e-3 * draft_len


LENGTHS = DraftLengthConfig(kind="fixed", num_tokens=DRAFT_LEN)  # time, which differs here, decides no length
COST = Cost((1, 64), (0.02, 0.02))


class Noting:
    """Waits for every proposal, so that rounds do not depend on time; keeps the plans."""

    def __init__(self) -> None:
        self._planner = StepPlanner(PlannerSettings("all", max_chunk_len=MAX_PASS_TOKENS))
        self.plans: list[StepPlan] = []

    def plan(self, sequences, context):  # type: ignore[no-untyped-def]
        awaited = [one.request_id for one in sequences if one.running and one.awaiting_since_s is not None]
        if awaited:
            return StepPlan((), held=dict.fromkeys(awaited, context.now_s + 1.0), wake_s=context.now_s + 1.0)
        plan = self._planner.plan(sequences, context)
        self.plans.append(plan)
        return plan

    def rounds(self) -> Rounds:
        """Without the passes over prompts."""
        found: Rounds = defaultdict(list)
        for plan in self.plans:
            for span in plan.spans:
                if span.num_compute == 1:
                    found[span.request_id].append(span.num_drafts)
        return dict(found)


def lookup() -> Drafter:
    return make_drafter(DrafterConfig(name="ngram", options=NgramOptions()), MODEL)


def load(seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for i in range(NUM_REQUESTS):
        words = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(2, 5))]
        prompt = tuple((words * 8)[: rng.randint(5, 30)])
        sampling = SamplingParams(rng.randint(8, 60), temperature=rng.choice((0.0, 0.0, 0.7)), seed=i, ignore_eos=i % 3 > 0)
        requests.append(Request(f"r{i}", prompt, sampling, 0.0))
    return requests


def live(requests: Sequence[Request]) -> Rounds:
    """A target and a drafter of real tokens, with their links and mailboxes, stepped in turn."""
    planner, lengths = Noting(), build_draft_lengths(LENGTHS, {"ngram": DRAFT_LEN})
    engine = ToyTarget(512, max_num_sequences=NUM_REQUESTS, max_pass_tokens=MAX_PASS_TOKENS, prefix_cache=False)
    linked = LinkedTarget(engine, COST, planner, lengths, drafter="ngram")
    drafter = linked.drafter_loop("ngram", lookup(), max_draft_len=DRAFT_LEN)
    linked.submit(*requests)
    while linked.loop.step(linked.clock.now_s).executed or linked.loop.status().num_running:
        linked.clock.now_s += 0.02
        while drafter.step(linked.clock.now_s):
            pass
    return planner.rounds()


def recorded(requests: Sequence[Request]) -> list[AgreementAnswer]:
    """What the lookup would draft at each position of the target's answers."""
    answers = [Recording(one.id, "toy", one.prompt_token_ids, plain_run(one), one.sampling) for one in requests]
    recorder = Recorder("toy", [("ngram", "ngram")], DRAFT_LEN, 0.0)
    for one, drafts in zip(answers, agreement(lookup(), answers, DRAFT_LEN), strict=True):
        recorder.add(one.name, "toy", len(one.prompt_token_ids), [drafts])
    recording = recorder.recording()
    return [recording.answer(number) for number in range(len(requests))]


def simulated(requests: Sequence[Request], answers: Sequence[AgreementAnswer]) -> Rounds:
    planner = Noting()
    spec = ClusterSpec(
        COST,
        PackedPass(COST),
        DraftByCost(COST),
        TargetLimits(4, 512, NUM_REQUESTS, MAX_PASS_TOKENS, MODEL.max_model_len),
        (DrafterSpec("ngram", max_draft_len=DRAFT_LEN),),
        lambda: planner,
        link_s=1e-3,
        draft_length=LENGTHS,
    )
    simulated = [
        SimulatedRequest(one.id, 0.0, len(one.prompt_token_ids), one.sampling.max_tokens, answer)
        for one, answer in zip(requests, answers, strict=True)
    ]
    simulate(spec, Fixed(("ngram",)), in_turn(simulated, len(simulated)))
    return planner.rounds()


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_the_live_loops(seed: int) -> None:
    requests = load(seed)
    rounds = live(requests)
    assert simulated(requests, recorded(requests)) == rounds
    assert rounds.keys() == {request.id for request in requests if len(plain_run(request)) > 1}
    num_tokens = sum(len(plain_run(request)) - 1 for request in requests)
    assert sum(map(len, rounds.values())) < 0.95 * num_tokens, "no draft was right"


def test_the_control_has_other_rounds() -> None:
    """Drafts that are never right."""
    requests = load(0)
    answers = recorded(requests)
    wrong = [
        replace(answer, by_drafter={"ngram": replace(one, right=bytes(len(one.right)))})
        for answer in answers
        for one in answer.by_drafter.values()
    ]
    assert simulated(requests, wrong) != live(requests)


# ---- recorded outputs tell exactly what a drafter gets accepted


REPLAYED_LEN = 5
PRECIOUS_PASSES = TableCost((1,), (100.0,))  # so precious that every proposal is waited for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def target_of(folder: Path) -> tuple[NativeTarget, ModelInfo]:
    return load_target(folder, dtype="float32", kv_cache_bytes=2**20, max_model_len=256), ModelInfo(
        "tiny", 257, 256, (256,), fingerprint(folder)
    )


def request(name: str, seed: int, temperature: float) -> Request:
    prompt = tuple(range(seed, seed + 9)) * 3
    return Request(name, prompt, SamplingParams(max_tokens=40, temperature=temperature, seed=seed), arrival_s=0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_replay_gets_accepted_what_the_engine_accepts(folder: Path, temperature: float) -> None:
    """One request after another, with a drafter that does not remember requests."""
    engine, info = target_of(folder)
    drafter = make(NgramOptions(min_match_len=1), Site(info, "cpu"))
    pool = {"ngram": PoolEntry(drafter, REPLAYED_LEN)}
    table = RoutingTable(version=0, defaults=(("ngram",),))
    planner = StepPlanner(PlannerSettings(verification="all", max_hold_s=60.0, overlap="barrier"))
    requests = [request(f"r{i}", 10 * i, temperature) for i in range(4)]
    length = DraftLengthConfig(kind="fixed", num_tokens=REPLAYED_LEN)
    with EmbeddedCluster(engine, info, PRECIOUS_PASSES, pool, planner, table, draft_length=length) as cluster:
        served = [cluster.complete([r])[0] for r in requests]
    recordings = [
        Recording(f"0/{r.id}", "d", r.prompt_token_ids, tuple(c.token_ids), r.sampling)
        for r, c in zip(requests, served, strict=True)
    ]
    rounds = list(replay(make(NgramOptions(min_match_len=1), Site(info, "cpu")), recordings, REPLAYED_LEN, batch=1))
    commits = [commit for completion in served for commit in completion.commits[1:]]
    assert any(commit.num_accepted for commit in commits)
    assert [len(commit.token_ids) for commit in commits] == [r.num_committed for r in rounds]
    assert [commit.num_accepted for commit in commits] == [r.num_accepted for r in rounds]


def test_every_token_is_committed_once_whatever_the_batch() -> None:
    recordings = [
        Recording(
            f"0/{i}", f"d{i % 2}", (1, 2, 3), tuple(7 + j % (i + 2) for j in range(20 + i)), SamplingParams(max_tokens=64)
        )
        for i in range(5)
    ]

    def rounds(batch: int) -> list[Round]:
        drafter: Drafter = SuffixDrafter(max_match_len=16, max_shared_tokens=0)
        return list(replay(drafter, recordings, REPLAYED_LEN, batch))

    for batch in (1, 3, 8):
        assert sum(r.num_committed for r in rounds(batch)) == sum(len(r.output_token_ids) - 1 for r in recordings)
    assert sorted(map(repr, rounds(1))) == sorted(map(repr, rounds(8)))


def test_the_common_prefix() -> None:
    assert common_prefix_len((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix_len((1, 2), (1, 2, 4)) == 2
    assert common_prefix_len((), (1,)) == 0
