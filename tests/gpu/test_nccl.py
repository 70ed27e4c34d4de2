"""Tensor parallelism over NCCL against one GPU."""

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster.sampling_params import SamplingParams
from engine.factory import load_target
from engine.native import NativeTarget
from engine.tensor_parallel.group import NcclRanks
from engine.tensor_parallel.local import load_over_local_ranks
from tests.support.target_driver import play
from tests.support.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
OPTIONS = {"dtype": "float32", "device": "cuda", "kv_cache_bytes": 2**24, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", **shape)


def played(engine: NativeTarget) -> list[tuple[int, ...]]:
    """Answers with a choice over candidates, and over whole rows."""
    rng = random.Random(1)
    prompts = {str(i): [rng.randrange(1, 250) for _ in range(20 + 7 * i)] for i in range(6)}
    options = [{}, {"top_p": 0.8}, {"presence_penalty": 0.5}]
    sampling = {
        name: SamplingParams(24, 0.8 * (i % 2), seed=i, ignore_eos=True, **options[i % 3])  # type: ignore[arg-type]
        for i, name in enumerate(prompts)
    }
    outputs = play(engine, prompts, sampling).outputs
    return [outputs[name] for name in prompts]


def test_one_rank_computes_over_nccl_what_a_target_without_ranks_does(folder: Path) -> None:
    """All calls of NCCL that several ranks make."""
    ranks = NcclRanks(dist.HashStore(), 0, 1, "127.0.0.1", 60.0, torch.device("cuda", 0))
    whole = load_target(folder, **OPTIONS)  # type: ignore[arg-type]
    assert played(load_target(folder, **OPTIONS, ranks=ranks)) == played(whole)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_ranks_give_the_tokens_of_one(folder: Path) -> None:
    whole = load_target(folder, **OPTIONS)  # type: ignore[arg-type]
    with closing(load_over_local_ranks(2, folder, OPTIONS)) as two:
        assert played(two) == played(whole)
