"""vLLM's own proposers as drafters of the pool: their drafts change no token, and are right where they must be."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

from cluster.config import HiddenStateKind, HiddenStateOptions
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request
from drafters.engine_proposals import EngineProposals, Proposing
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from drafters.protocol import Demand, Draft
from engine.models.config import load_config
from engine.models.tokenizer import fingerprint
from engine.vllm.environment import prepare_environment
from router.plan import Span
from tests.support.dspark import write_speculators
from tests.support.target_driver import play, play_with_drafter
from tests.support.tiny_model import write_tiny_model
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


class SeldomAsked(EngineProposals):
    """In every third round."""

    num_rounds = 0

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_rounds += 1
        return super().propose([replace(one, num_tokens=0 if self.num_rounds % 3 else one.num_tokens) for one in demands])


def played(
    target: Path, proposer: Mapping[str, Any], requests: Mapping[str, Request], **more: Any
) -> tuple[list[Any], list[Sequence[int]]]:
    """([outputs, accepted, drafted tokens], all proposals)"""
    counts, proposals = played_proposals(target, proposer, requests, **more)
    return counts, list(proposals.values())


def played_proposals(
    target: Path,
    proposer: Mapping[str, Any],
    requests: Mapping[str, Request],
    feature_layers: Sequence[int] = (),
    drafter_class: type[EngineProposals] = EngineProposals,
) -> tuple[list[Any], dict[tuple[str, int], tuple[int, ...]]]:
    with closing(make_vllm(target, proposer=proposer, feature_layers=feature_layers, **SIZE)) as engine:
        assert isinstance(engine, Proposing)
        drafter = drafter_class(engine)
        counts, proposals = play_with_drafter(engine, drafter, requests, DRAFT_LEN)
        drafter.check_integrity()
        return counts, proposals


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


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_proposer_drafts_the_same_after_rounds_that_did_not_ask_it(target: Path, method: str, tmp_path: Path) -> None:
    head = target if method == "draft_model" else write_eagle3(tmp_path / "head", target)
    proposer, one = {"method": method, "model": str(head)}, asked(temperature=0.0, num=1)
    _, always = played_proposals(target, proposer, one)
    (_, num_accepted, num_drafted), seldom = played_proposals(target, proposer, one, drafter_class=SeldomAsked)
    assert num_drafted >= 8
    if method == "draft_model":
        assert num_accepted == num_drafted
    else:
        drafted = {key: draft for key, draft in seldom.items() if draft}
        assert {key: always[key] for key in drafted} == drafted


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


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_in_the_format_that_training_writes_drafts_as_in_the_pool(kind: HiddenStateKind, tmp_path: Path) -> None:
    """As `outrider train` writes it: vLLM's proposer and our drafter beside the same target draft the same tokens, but for a
    few."""
    target = write_tiny_model(tmp_path / "model", num_layers=4, hidden_size=128)
    reduced = tuple(range(0, 256, 2))
    block: dict[str, Any] = {}
    if kind == "dflash":
        shape = replace(load_config(target).truncated(1), architecture="qwen3", qk_norm=True)
        block = {"shape": shape, "block_size": 1 + DRAFT_LEN}  # vLLM computes so many rows, whatever the folder says
    write_speculators(tmp_path / "head", target, kind, target_layer_ids=(0, 1, 2), draft_token_ids=reduced, **block)
    requests = {
        f"r{i}": replace(one, prompt_token_ids=one.prompt_token_ids[:60]) for i, one in enumerate(asked(0.0).values())
    }
    (theirs, *_), of_vllm = played_proposals(target, {"method": kind, "model": str(tmp_path / "head")}, requests)
    with closing(make_vllm(target, feature_layers=(0, 1, 2))) as engine:
        options = HiddenStateOptions(kind=kind, path=str(tmp_path / "head"), dtype="float32", min_survival=0.0)
        model = ModelInfo("tiny", 257, 512, (256,), fingerprint(target))
        drafter = make_hidden_state_drafter(options, model, Host(engine, target))
        (ours, *_), of_pool = play_with_drafter(engine, drafter, requests, DRAFT_LEN)
    assert ours == theirs
    common = [key for key, draft in of_vllm.items() if draft and len(draft) == len(of_pool.get(key, ()))]
    assert len(common) > 4 * 10
    same = [of_pool[key][: i + 1] == of_vllm[key][: i + 1] for key in common for i in range(len(of_vllm[key]))]
    assert sum(same) / len(same) > 0.9


def test_a_draft_model_reads_no_layers_that_other_drafters_read(target: Path) -> None:
    proposer = {"method": "draft_model", "model": str(target)}
    (_, num_accepted, num_drafted), _ = played(target, proposer, asked(temperature=0.0), feature_layers=(2,))
    assert num_accepted == num_drafted > 4 * 10


def fail_after_drafting(worker: Any, rank: int) -> None:
    """``rank``: on which the proposer fails, when its collectives are over."""
    propose = worker.model_runner.drafter.propose

    def fail(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        if worker.rank == rank:
            raise RuntimeError("out of order")
        return drafts

    worker.model_runner.drafter.propose = fail


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_proposer_that_fails_on_one_rank_costs_its_drafts_alone(target: Path, num_ranks: int) -> None:
    """No rank is asked again: it would wait for that one in a collective."""
    one = {name: replace(r, sampling=replace(r.sampling, max_tokens=4)) for name, r in asked(temperature=0.0, num=1).items()}
    (plain, *_), _ = played(target, {}, one)
    proposer = {"method": "draft_model", "model": str(target)}
    with closing(make_vllm(target, proposer=proposer, num_ranks=num_ranks, **SIZE)) as engine:
        assert isinstance(engine, Proposing)
        cast(Any, engine)._core.model_executor.collective_rpc(partial(fail_after_drafting, rank=num_ranks - 1))
        played_after = play(
            engine, {name: r.prompt_token_ids for name, r in one.items()}, {name: r.sampling for name, r in one.items()}
        )
        assert played_after.outputs == plain
        with pytest.raises(RuntimeError, match="not called after an error"):
            engine.draft(DRAFT_LEN)


def fall_silent(worker: Any) -> None:
    """The last rank never answers when it is asked for drafts."""
    if worker.rank:
        worker.draft = lambda num_tokens: Event().wait()


def test_a_rank_that_never_answers_ends_the_engine(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once vLLM's own time-out for a pass is over: the rank may still wait in a collective that a later pass would join."""
    with closing(make_vllm(target, proposer={"method": "draft_model", "model": str(target)}, num_ranks=2, **SIZE)) as engine:
        assert isinstance(engine, Proposing)
        (request,) = asked(temperature=0.0, num=1).values()
        engine.open(request, request.prompt_token_ids)
        spans = [Span.bound(request.id, 0, request.prompt_token_ids)]
        engine.execute(spans)
        cast(Any, engine)._core.model_executor.collective_rpc(fall_silent)
        monkeypatch.setattr("vllm.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 1, raising=False)
        with pytest.raises(TimeoutError, match="draft timed out"):
            engine.draft(DRAFT_LEN)
        with pytest.raises(RuntimeError, match="computes nothing after an error"):
            engine.execute(spans)
        assert engine.draft(DRAFT_LEN) == {}, "it is not asked again"
