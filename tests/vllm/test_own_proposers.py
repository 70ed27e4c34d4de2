"""vLLM's own proposers as drafters of the pool: their drafts change no token, and are right where they must be."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cluster.sampling_params import SamplingParams
from cluster.types import Request
from drafters.engine_proposals import EngineProposals, Proposing
from engine.vllm.environment import prepare_environment
from tests.support.target_driver import play_with_drafter
from tests.support.vllm_engine import make_vllm
from tests.support.vllm_models import write_eagle3, write_model

pytestmark = pytest.mark.vllm

NUM_NEW, DRAFT_LEN = 24, 5
SIZE = {"kv_cache_bytes": 16 * 2**20}


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")
    prepare_environment()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), "qwen3-yarn")


def asked(temperature: float, num: int = 4) -> Mapping[str, Request]:
    sampling = SamplingParams(NUM_NEW, temperature, seed=3, ignore_eos=True)
    return {f"r{i}": Request(f"r{i}", tuple(range(1 + i, 90 - 17 * i)), sampling, 0.0) for i in range(num)}


def played(
    target: Path, proposer: Mapping[str, Any], requests: Mapping[str, Request]
) -> tuple[list[Any], list[Sequence[int]]]:
    """([outputs, accepted, drafted tokens], all proposals)"""
    with closing(make_vllm(target, proposer=proposer, **SIZE)) as engine:
        assert isinstance(engine, Proposing)
        drafter = EngineProposals(engine)
        counts, proposals = play_with_drafter(engine, drafter, requests, DRAFT_LEN)
        drafter.check_integrity()
        return counts, list(proposals.values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_equal_to_the_target_is_always_right(target: Path, temperature: float) -> None:
    (plain, _, none), _ = played(target, {}, asked(temperature))
    assert none == 0
    (outputs, num_accepted, num_drafted), _ = played(
        target, {"method": "draft_model", "model": str(target)}, asked(temperature)
    )
    assert outputs == plain
    assert num_drafted > 4 * 10
    if temperature == 0.0:
        assert num_accepted == num_drafted


def test_a_prompt_in_chunks_is_known_whole(target: Path) -> None:
    """Nothing is drafted after its first chunks."""
    (_, num_accepted, num_drafted), _ = played(
        target, {"method": "draft_model", "model": str(target)}, asked(temperature=0.0, num=1)
    )
    assert num_accepted == num_drafted > 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_random_eagle3_head_changes_no_token(target: Path, temperature: float, tmp_path: Path) -> None:
    (plain, *_), _ = played(target, {}, asked(temperature))
    head = write_eagle3(tmp_path / "head", target)
    (outputs, _, num_drafted), proposals = played(target, {"method": "eagle3", "model": str(head)}, asked(temperature))
    assert outputs == plain
    assert num_drafted > 4 * 10
    assert len({tuple(draft) for draft in proposals}) > 4
