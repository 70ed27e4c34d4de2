"""vLLM's engine over two ranks: what the contract of targets does not say."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.embedded import EmbeddedCluster
from cluster.config import HiddenStateOptions
from cluster.errors import InvalidField, LinkClosed, Overloaded, RankLost
from cluster.sampling_params import SamplingParams
from cluster.types import Adapter, ModelInfo, Request
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from engine.models.tokenizer import fingerprint
from engine.target import AdapterHost, LoadedTarget
from router.cost_model import TableCost
from router.plan import Span
from tests.support.dspark import write_dspark
from tests.support.features import rows_of
from tests.support.target_driver import play, play_with_drafter
from tests.support.tiny_model import write_tiny_model
from tests.support.vllm_engine import EOS, MAX_MODEL_LEN, has_ended, make_vllm, rank_processes
from tests.support.vllm_models import write_adapter
from tests.support.waiting import eventually

pytestmark = pytest.mark.vllm

LAYERS = (-1, 0, 1)
ENGINE = """
import sys
from pathlib import Path
from tests.support.vllm_engine import make_vllm
from tests.support.target_driver import play
from cluster.sampling_params import SamplingParams
if __name__ == "__main__":
    engine = make_vllm(Path(sys.argv[1]), num_ranks=2)
    while True:
        play(engine, {"a": (1, 2, 3)}, {"a": SamplingParams(max_tokens=200, ignore_eos=True)})
        print("played", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=128)


@pytest.fixture(scope="module")
def one(folder: Path) -> LoadedTarget:
    return make_vllm(folder, feature_layers=LAYERS)


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LoadedTarget]:
    with closing(make_vllm(folder, feature_layers=LAYERS, num_ranks=2)) as engine:
        ranks = rank_processes()
        assert len(ranks) == 2
        yield engine
    assert all(map(has_ended, ranks))


def requests(prefix: str, max_tokens: int = 40) -> list[Request]:
    return [
        Request(
            f"{prefix}-{i}",
            tuple(range(1 + i, 30 + 11 * i)),
            SamplingParams(max_tokens, 0.8 * (i % 2), seed=i, ignore_eos=True, top_logprobs=2 if i == 3 else None),
            arrival_s=0.0,
        )
        for i in range(5)
    ]


def test_two_ranks_choose_the_tokens_of_one(one: LoadedTarget, two: LoadedTarget) -> None:
    asked = requests("same")
    prompts = {request.id: request.prompt_token_ids for request in asked}
    sampling = {request.id: request.sampling for request in asked}
    alone = play(one, prompts, sampling)
    assert play(two, prompts, sampling).outputs == alone.outputs
    right = play(two, prompts, sampling, lambda name, length: (*alone.outputs[name][length - len(prompts[name]) :][:6], 7))
    assert right.outputs == alone.outputs
    assert right.num_passes < alone.num_passes / 3


def test_hidden_states_and_embedding_are_those_of_one_rank(one: LoadedTarget, two: LoadedTarget) -> None:
    torch.testing.assert_close(one.embedding, two.embedding)
    (asked,) = requests("states")[:1]
    found = []
    for engine in (one, two):
        engine.open(asked, asked.prompt_token_ids)
        engine.execute([Span.bound(asked.id, 0, asked.prompt_token_ids[:16], samples=False)])
        engine.execute([Span.bound(asked.id, 16, asked.prompt_token_ids[16:])])
        found.append(rows_of(engine, asked.id, 0, len(asked.prompt_token_ids)))
        engine.release(asked.id)
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_dspark_proposes_as_beside_one_rank(one: LoadedTarget, two: LoadedTarget, folder: Path, tmp_path: Path) -> None:
    options = HiddenStateOptions(path=str(write_dspark(tmp_path / "dspark", folder)), dtype="float32", min_survival=0.0)
    asked = {request.id: request for request in requests("dspark", 20)}
    played = []
    for engine in (one, two):
        drafter = make_hidden_state_drafter(options, model_of(folder), Host(engine, folder))
        played.append(play_with_drafter(engine, drafter, asked))
    assert played[0] == played[1]
    assert sum(map(len, played[0][1].values())) > 100


def model_of(folder: Path) -> ModelInfo:
    return ModelInfo("tiny", 257, MAX_MODEL_LEN, (EOS,), fingerprint(folder))


def test_a_rank_killed_in_a_pass_ends_the_engine(folder: Path) -> None:
    """The other one waits for it in a collective."""
    others = rank_processes()
    engine = make_vllm(folder, num_ranks=2)
    ranks, num_passes, execute = rank_processes(before=others), 0, engine.execute

    def killing(spans: Sequence[Span]) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 9:
            ranks[0].kill()
        return execute(spans)

    engine.execute = killing  # type: ignore[method-assign]
    cluster = EmbeddedCluster(engine, model_of(folder), TableCost((1, 32), (0.02, 0.03)), {})
    completing = cluster.begin(requests("killed"))
    lost = "RankLost: rank 0 (exit code -9) of the 2 ranks of vLLM ended"
    with pytest.raises(LinkClosed, match=re.escape(f"the target failed: {lost}; send the request again")):
        completing.ended.result()
    assert all(completion.token_ids for completion in completing.completions)
    with pytest.raises(RuntimeError, match="the embedded target failed: RankLost"):
        cluster.close()
    eventually(lambda: all(map(has_ended, ranks)))
    with pytest.raises(RuntimeError, match="computes nothing after an error"):
        engine.execute([Span.bound("later", 0, (1, 2))])
    engine.close()


def test_ranks_end_with_the_process_of_the_target(folder: Path) -> None:
    """Killed in the midst of passes, as Ray kills an actor."""
    command = [sys.executable, "-c", ENGINE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdout is not None
        assert "played\n" in target.stdout  # reads to that line
        ranks = rank_processes(target.pid)
        assert len(ranks) == 2
        target.kill()
    eventually(lambda: all(map(has_ended, ranks)))


def test_an_idle_engine_tells_of_a_lost_rank_and_leaves_none(two: LoadedTarget) -> None:
    """The last test, since it ends the engine of the others."""
    ranks = rank_processes()
    two.check_integrity()
    ranks[1].kill()
    eventually(lambda: all(map(has_ended, ranks)))
    with pytest.raises(RankLost, match=r"^rank 1 \(exit code -9\) of the 2 ranks of vLLM ended$"):
        two.check_integrity()


def test_ranks_take_an_adapter_or_refuse_it_together(folder: Path, tmp_path: Path) -> None:
    """There is room for one: it is replaced by another, unless it has requests."""
    first, second = (Adapter(name, str(write_adapter(tmp_path / name, folder, i)), name) for i, name in enumerate("ab"))
    narrow = Adapter("narrow", str(write_adapter(tmp_path / "narrow", folder, 3, inputs=64)), "")
    asked, sampling = {"x": tuple(range(1, 60))}, {"x": SamplingParams(24, 0.0, ignore_eos=True)}
    outputs = []
    for num_ranks in (1, 2):
        with closing(make_vllm(folder, num_ranks=num_ranks, num_adapters=1)) as engine:
            assert isinstance(engine, AdapterHost)
            for former, adapter in ((None, first), (first, second)):
                with pytest.raises(InvalidField, match="matrices of"):
                    engine.load_adapter(narrow, ())
                assert former is None or engine.has_adapter(former), "what does not fit replaces nothing"
                engine.load_adapter(adapter, ())
                with pytest.raises(Overloaded, match="max_loras"):
                    engine.load_adapter(narrow, [adapter])
                outputs.append(play(engine, asked, sampling, adapters={"x": adapter}).outputs["x"])
    assert outputs[:2] == outputs[2:]
    assert len(set(outputs)) == 2
