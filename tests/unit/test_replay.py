"""Recorded outputs tell exactly what a drafter gets accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from benchmarks.replay_lens import replay_lens
from cluster.config import DraftLengthConfig, NgramOptions
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request, RoutingTable
from drafters.protocol import Capabilities, Demand, Draft, Drafter
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


@dataclass
class Copying:
    """Knows the answers but for every ``wrong_every``-th position; learns nothing. Its confidences name the position."""

    answers: dict[str, tuple[int, ...]]
    wrong_every: int
    lengths: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    capabilities = Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.lengths[request_id] = len(token_ids) - prompt_len

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        start = self.lengths[request_id]
        assert tuple(token_ids) == self.answers[request_id][start : start + len(token_ids)]
        self.lengths[request_id] += len(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = []
        for demand in demands:
            start = self.lengths[demand.request_id]
            self.asked.append((demand.request_id, start))
            positions = range(start, start + demand.num_tokens)
            answer = self.answers[demand.request_id]
            token_ids = tuple(-1 if t % self.wrong_every == 0 else answer[t] for t in positions)
            drafts.append(Draft(demand.request_id, token_ids, tuple(1.0 / (t + 1) for t in positions)))
        return drafts

    def release(self, request_id: str) -> None:
        del self.lengths[request_id]

    def check_integrity(self) -> None: ...


@pytest.mark.parametrize("wrong_every", [2, 3, 6, 9, 100])
def test_one_walk_for_several_draft_lengths_finds_what_a_walk_for_each_finds(wrong_every: int) -> None:
    sampling = SamplingParams(max_tokens=64)
    recordings = [Recording(f"0/{i}", f"d{i}", (1, 2, 3), tuple(range(7, 27 + 9 * i)), sampling) for i in range(5)]

    def copying() -> Copying:
        return Copying({r.name: r.output_token_ids for r in recordings}, wrong_every)

    together = copying()
    found = list(replay_lens(together, recordings, (7, 4), batch=3))
    assert not together.lengths
    assert len(together.asked) == len(set(together.asked)), "nothing is asked twice"
    for draft_len in (7, 4):
        alone = list(replay(copying(), recordings, draft_len, batch=3))
        assert sorted(map(repr, alone)) == sorted(repr(r) for n, r in found if n == draft_len)


def test_the_common_prefix() -> None:
    assert common_prefix_len((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix_len((1, 2), (1, 2, 4)) == 2
    assert common_prefix_len((), (1,)) == 0
