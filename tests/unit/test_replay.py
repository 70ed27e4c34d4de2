"""Recorded outputs tell exactly what a drafter gets accepted."""

from pathlib import Path

import pytest

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import DraftLengthConfig, NgramOptions
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request, RoutingTable
from drafters.protocol import Drafter
from drafters.registry import Site, make
from drafters.replay import Recording, Round, replay
from engine.acceptance import common_prefix_len
from engine.factory import load_target
from engine.models.tokenizer import fingerprint
from engine.native import NativeTarget
from router.cost_model import TableCost
from router.planning.planner import PlannerSettings, StepPlanner
from tests.reference.suffix import SuffixDrafter
from tests.support.tiny_model import write_tiny_model

DRAFT_LEN = 5
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
    pool = {"ngram": PoolEntry(drafter, DRAFT_LEN)}
    table = RoutingTable(version=0, defaults=(("ngram",),))
    planner = StepPlanner(PlannerSettings(verification="all", max_hold_s=60.0, overlap="barrier"))
    requests = [request(f"r{i}", 10 * i, temperature) for i in range(4)]
    length = DraftLengthConfig(kind="fixed", num_tokens=DRAFT_LEN)
    with EmbeddedCluster(engine, info, PRECIOUS_PASSES, pool, planner, table, draft_length=length) as cluster:
        served = [cluster.complete([r])[0] for r in requests]
    recordings = [
        Recording(f"0/{r.id}", "d", r.prompt_token_ids, tuple(c.token_ids), r.sampling)
        for r, c in zip(requests, served, strict=True)
    ]
    rounds = list(replay(make(NgramOptions(min_match_len=1), Site(info, "cpu")), recordings, DRAFT_LEN, batch=1))
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
        return list(replay(drafter, recordings, DRAFT_LEN, batch))

    for batch in (1, 3, 8):
        assert sum(r.num_committed for r in rounds(batch)) == sum(len(r.output_token_ids) - 1 for r in recordings)
    assert sorted(map(repr, rounds(1))) == sorted(map(repr, rounds(8)))


def test_the_common_prefix() -> None:
    assert common_prefix_len((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix_len((1, 2), (1, 2, 4)) == 2
    assert common_prefix_len((), (1,)) == 0
