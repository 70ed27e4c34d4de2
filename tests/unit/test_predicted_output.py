"""Drafts from the output that a caller predicted: they cost nothing, they change no token, and they count by themselves."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.embedded import Completion, EmbeddedCluster, PoolEntry
from cluster.config import DrafterConfig, DraftLengthConfig, NgramOptions
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.types import MAX_DRAFT_LEN, PREDICTION, ModelInfo, Request, RoutingTable
from drafters.protocol import Capabilities, Demand, Draft
from drafters.registry import make_drafter
from engine.colocated import ColocatedDrafters
from engine.factory import load_target
from engine.native import NativeTarget
from engine.predicted_output import NEAR, PredictedOutput
from router.cost_model import TableCost
from router.drafting.policies import VERIFICATION_POLICIES
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.verification import a_pass, decide, decoding

COST = TableCost((1, 64), (0.02, 0.021))
MODEL = ModelInfo("tiny", 257, 512, (256,), "tiny")
NUM = 140  # tokens of an output


def drafted(prediction: PredictedOutput, num: int = 4) -> tuple[int, ...]:
    return prediction.draft()[0][:num]


# ---- where the output stands


def test_a_right_prediction_is_drafted_to_its_end() -> None:
    prediction = PredictedOutput(range(100))
    assert drafted(prediction, 99) == tuple(range(MAX_DRAFT_LEN))
    prediction.advance(range(90))
    assert drafted(prediction, 99) == tuple(range(90, 100))
    prediction.advance(range(90, 100))
    assert prediction.draft() == ((), ())
    prediction.advance([500])
    assert prediction.draft() == ((), ()), "nothing in it is like the output now"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([1, 2, 3, 90, 5], (6, 7, 8, 9)),  # 4 was replaced
        ([1, 2, 3, 90, 91, 92, 4], (5, 6, 7, 8)),  # tokens were inserted before it
        ([1, 2, 6], (7, 8, 9, 10)),  # 3 to 5 were left out
        ([1, 2, 90, 91, 12, 13], (14, 15, 16)),
        ([1, 2, 3, 1, 2], (3, 4, 5, 6)),  # it begins again
        ([90, 91], ()),
    ],
)
def test_behind_a_difference_its_place_is_found_again(output: list[int], expected: tuple[int, ...]) -> None:
    prediction = PredictedOutput(range(1, 17))
    for token_id in output:
        prediction.advance([token_id])
    assert drafted(prediction) == expected
    assert drafted(PredictedOutput(range(1, 17), output)) == expected, "also for another target, which continues the output"


def test_the_next_place_comes_before_former_ones_and_one_token_counts_only_near() -> None:
    twice = PredictedOutput([1, 2, 3, 4, 5, 1, 2, 6, 7])
    twice.advance([1, 2, 3, 4, 9, 1, 2])
    assert drafted(twice) == (6, 7)
    far = PredictedOutput([1, *[0] * NEAR, 2, 3, 4])
    far.advance([2])
    assert drafted(far) == ()
    far.advance([3])
    assert drafted(far) == (4,)


def test_confidence_grows_with_what_agreed() -> None:
    prediction = PredictedOutput(range(100))
    first = prediction.draft()[1]
    prediction.advance(range(20))
    later = prediction.draft()[1]
    prediction.advance([500, 31])
    found_again = prediction.draft()[1]
    assert found_again[0] < first[0] < later[0] < 1.0
    assert list(first) == sorted(first)


def test_any_output_and_any_token_can_be_followed() -> None:
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.choice((0, 1, 2, 0xD800, 0xDFFF, 150_000)) for _ in range(rng.randint(1, 40))]
        prediction = PredictedOutput(token_ids)
        for _ in range(20):
            found, confidences = prediction.draft()
            assert len(found) == len(confidences) <= MAX_DRAFT_LEN
            assert not found or any(tuple(token_ids[i : i + len(found)]) == found for i in range(len(token_ids)))
            assert all(0.0 < one < 1.0 for one in confidences)
            prediction.advance([*found[: rng.randint(0, 4)], *rng.choices(token_ids, k=rng.randint(0, 2))])


# ---- through a target


@pytest.fixture(scope="module")
def engine(tiny_model_folder: Path) -> NativeTarget:
    target = load_target(tiny_model_folder, dtype="float32", kv_cache_bytes=2**22, max_model_len=512)
    assert isinstance(target, NativeTarget)
    return target


def running(engine: NativeTarget, pool: dict[str, PoolEntry]) -> EmbeddedCluster:
    planner = StepPlanner(PlannerSettings("all", 1.0, overlap="barrier"))
    return EmbeddedCluster(
        engine,
        MODEL,
        COST,
        pool,
        planner,
        grammars=engine.grammars,
        draft_length=DraftLengthConfig(kind="fixed", num_tokens=4),
    )


@pytest.fixture
def alone(engine: NativeTarget) -> Iterator[EmbeddedCluster]:
    """A target without a pool."""
    with running(engine, {}) as cluster:
        yield cluster
    engine.check_integrity()


@pytest.fixture
def pooled(engine: NativeTarget) -> Iterator[EmbeddedCluster]:
    pool = {"lookup": PoolEntry(make_drafter(DrafterConfig(name="lookup", options=NgramOptions()), MODEL))}
    with running(engine, pool) as cluster:
        yield cluster
    engine.check_integrity()


def request(i: int, grammar: Grammar | None = None, max_tokens: int = NUM) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, grammar=grammar)
    return Request(f"r{i}", (1, 2, i + 3), sampling, float(i))


def plain(cluster: EmbeddedCluster, requests: list[Request]) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for one in cluster.complete([replace(asked, chain=()) for asked in requests])]


def predicting(asked: Request, *token_ids: int) -> Request:
    return replace(asked, prediction_token_ids=token_ids)


def by_drafter(done: Completion, name: str) -> tuple[int, int]:
    own = [commit for commit in done.commits if commit.drafter == name]
    return sum(commit.num_proposed for commit in own), sum(commit.num_accepted for commit in own)


def test_a_right_prediction_needs_a_pass_for_each_longest_draft(alone: EmbeddedCluster) -> None:
    requests = [request(i) for i in range(4)]
    truths = plain(alone, requests)
    done = alone.complete([predicting(one, *truth) for one, truth in zip(requests, truths, strict=True)])
    for one, truth in zip(done, truths, strict=True):
        assert tuple(one.token_ids) == truth
        assert len(one.commits) == 1 + -(-(NUM - 1) // (MAX_DRAFT_LEN + 1))
        num_proposed, num_accepted = by_drafter(one, PREDICTION)
        assert num_proposed == num_accepted == NUM - len(one.commits)


def test_behind_an_edit_it_is_drafted_again(alone: EmbeddedCluster) -> None:
    asked = request(1)
    (truth,) = plain(alone, [asked])
    edited = (*truth[:50], 7, 7, 7, *truth[60:100], *truth[110:])
    (done,) = alone.complete([predicting(asked, *edited)])
    assert tuple(done.token_ids) == truth
    assert by_drafter(done, PREDICTION)[1] > NUM * 0.8
    assert len(done.commits) < NUM * 0.2


def test_no_prediction_changes_a_token(pooled: EmbeddedCluster) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[a-e ]+\\.")
    for requests in ([request(i, None, 70) for i in range(6)], [request(i, grammar, 70) for i in range(6)]):
        truths = plain(pooled, requests)
        rng = random.Random(0)
        predictions = [
            truths[0],
            tuple(rng.randrange(257) for _ in range(300)),
            truths[2][:30],
            (*truths[3], *truths[3]),
            (truths[4][0],) * 500,
            tuple(one for one in truths[5] for _ in range(2)),
        ]
        done = pooled.complete([predicting(one, *ids) for one, ids in zip(requests, predictions, strict=True)])
        assert [tuple(one.token_ids) for one in done] == truths
        assert by_drafter(done[0], PREDICTION)[1] > 0.5 * len(truths[0])


def test_a_call_for_the_target_alone_is_not_drafted(pooled: EmbeddedCluster) -> None:
    (done,) = pooled.complete([replace(predicting(request(0, max_tokens=9), 1, 2, 3), chain=())])
    assert {commit.drafter for commit in done.commits} == {None}


def test_what_is_observed_of_the_pool_leaves_predictions_out(pooled: EmbeddedCluster) -> None:
    telemetry = pooled.loop.telemetry
    pooled.loop.publish_table(RoutingTable(1, defaults=(("lookup",),), scorers=("lookup",)))
    asked = request(1)
    (truth,) = plain(pooled, [asked])
    telemetry.take_observations()
    before = telemetry.drafter("lookup").num_proposed
    (done,) = pooled.complete([predicting(asked, *truth)])
    observed = telemetry.take_observations()
    num_proposed, num_accepted = by_drafter(done, PREDICTION)
    assert {one.drafter for one in observed} <= {"lookup"}
    assert sum(one.num_accepted for one in observed) == done.num_accepted - num_accepted
    assert telemetry.drafter("lookup").num_proposed - before == done.num_proposed - num_proposed
    assert telemetry.drafter(PREDICTION).num_accepted == num_accepted > 0
    assert {one.drafter for one in telemetry.take_scores()} <= {"lookup"}


class _Counting:
    """Drafts a wrong token for each demand, and counts demands."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.num_demands = 0

    def open(self, request_id: str, token_ids: Sequence[int], *others: object) -> None: ...

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None: ...

    def release(self, request_id: str) -> None: ...

    def check_integrity(self) -> None: ...

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_demands += len(demands)
        return [Draft(one.request_id, (0,), (0.5,)) for one in demands]


def test_a_drafter_on_the_targets_device_drafts_nothing_beside_a_prediction(
    engine: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ColocatedDrafters, "is_queried", lambda *_: True)  # it pays here to draft nothing
    requests, drafter = [request(i) for i in range(4)], _Counting()
    with running(engine, {"wrong": PoolEntry(drafter, companion=True)}) as cluster:
        truths = plain(cluster, requests)
        assert not drafter.num_demands
        assert [tuple(one.token_ids) for one in cluster.complete(requests)] == truths
        assert drafter.num_demands > NUM
        drafter.num_demands = 0
        done = cluster.complete([predicting(one, *truth) for one, truth in zip(requests, truths, strict=True)])
        assert not drafter.num_demands
        assert [tuple(one.token_ids) for one in done] == truths
        cluster.complete([predicting(requests[0], *truths[0][:70])])
        assert drafter.num_demands > NUM - 80, "a prediction that has ended displaces nothing"


@pytest.mark.parametrize("policy", VERIFICATION_POLICIES)
def test_no_more_is_verified_than_an_engine_can(policy: str) -> None:
    context = a_pass(TableCost((1, 64), (0.02, 0.021)), max_verify_len=16)
    assert decide(policy, [decoding("r", [0.99] * 40)], context).verify_lens == [16]
