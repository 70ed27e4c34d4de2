"""What vLLM tells of a model before it is loaded, and hidden states of models whose layers have several kinds of caches."""

import random
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cluster.config import Config, ModelConfig, TargetConfig
from cluster.config.target import OURS, OWNED
from cluster.errors import InvalidField, ModelUnavailable
from engine.model_facts import read_facts
from engine.target import LoadedTarget
from engine.vllm.arguments import argument_switches, engine_arguments
from engine.vllm.environment import prepare_environment
from router.plan import Span
from tests.support.features import rows_of
from tests.support.requests import a_request
from tests.support.vllm_engine import BLOCK_LEN, MAX_MODEL_LEN, make_vllm
from tests.support.vllm_models import WINDOW, write_model

pytestmark = pytest.mark.vllm

LAYERS = (-1, 1, 3)
KV_CACHE_BYTES = 8 * 2**20


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt-oss") / "model", "gpt-oss")


@pytest.fixture(scope="module")
def windowed(folder: Path) -> Iterator[LoadedTarget]:
    """Half of its layers keep a window of positions, the others all of them."""
    with closing(make_vllm(folder, kv_cache_bytes=KV_CACHE_BYTES, feature_layers=LAYERS)) as engine:
        yield engine


def config_of(folder: Path, num_ranks: int = 1, **more: object) -> Config:
    target = TargetConfig(engine="vllm", dtype="float32", tensor_parallel=num_ranks, vllm=more)
    return Config(model=ModelConfig(name=str(folder)), target=target)


def test_the_sizes_of_a_model_are_vllms(folder: Path) -> None:
    """Four ranks share two key-value heads: each holds a copy of one."""
    facts = read_facts(config_of(folder), folder)
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers, facts.max_len) == (257, 128, 4, MAX_MODEL_LEN)
    assert facts.eos_token_ids == (256,)
    assert facts.kv_bytes_per_token == 2 * 4 * 2 * 32 * 4
    assert read_facts(config_of(folder, 4), folder).kv_bytes_per_token == 2 * 4 * 1 * 32 * 4


def test_what_vllm_refuses_is_refused_before_the_start_with_its_reason(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"tensor_parallel: .*attention heads \(4\) must be divisible.*got 3"):
        read_facts(config_of(folder, 3), folder)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchForCausalLM"]}')
    with pytest.raises(ModelUnavailable, match=r"vLLM refuses it: .*NoSuchForCausalLM"):
        read_facts(config_of(tmp_path), tmp_path)
    with pytest.raises(InvalidField, match=r"target\.vllm\.quantisation: .*did you mean quantization\?"):
        read_facts(config_of(folder, quantisation="awq"), folder)


def test_all_arguments_of_the_engine_are_known_to_vllm(folder: Path) -> None:
    """Also those for a GPU, of which vLLM makes no engine here, and those that a file may not set."""
    prepare_environment()
    from vllm.engine.arg_utils import EngineArgs

    for device, is_eager in (("cpu", True), ("cuda", False)):
        target = TargetConfig(engine="vllm", dtype="bfloat16", device=device, kv_cache_gb=2**-10)
        arguments = EngineArgs(**engine_arguments(folder, target, 64))
        assert (arguments.enforce_eager, arguments.kv_cache_memory_bytes) == (is_eager, 2**20)
    assert set(OURS) | set(OWNED) <= set(argument_switches())


def test_hidden_states_lie_in_the_slots_of_layers_with_full_attention(windowed: LoadedTarget) -> None:
    """Of a prompt longer than the window, and again where the prefix cache holds it. The first columns are the embedding."""
    prompt = tuple(random.Random(1).randrange(250) for _ in range(2 * WINDOW + 10))
    found = []
    for name, num_cached in (("first", 0), ("again", 2 * WINDOW)):
        assert windowed.open(a_request(name, prompt, max_tokens=4, temperature=0.0, ignore_eos=True), prompt) == num_cached
        windowed.execute([Span.bound(name, num_cached, prompt[num_cached:])])
        found.append(rows_of(windowed, name, 0, len(prompt)))
        windowed.release(name)
    torch.testing.assert_close(found[0][:, :128], windowed.embedding[list(prompt)])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    assert found[0].shape == (len(prompt), len(LAYERS) * 128)
    assert windowed.embedding.shape == (257, 128)


def test_the_capacity_counts_the_blocks_of_all_layers(windowed: LoadedTarget) -> None:
    """The cache holds one sequence of the longest kind at least, and is full when no block is free."""
    capacity = windowed.capacity()
    assert capacity.num_blocks == capacity.num_free_blocks >= MAX_MODEL_LEN // BLOCK_LEN
    per_block = 2 * 4 * 2 * 32 * 4 * BLOCK_LEN  # bytes of a sequence in all layers
    assert capacity.num_blocks >= KV_CACHE_BYTES // per_block - 2  # windows take less of a long sequence
    assert (capacity.block_len, capacity.max_model_len) == (BLOCK_LEN, MAX_MODEL_LEN)


def test_a_model_without_hidden_states_refuses_drafters_that_read_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "glm-4", "glm-4")
    with pytest.raises(InvalidField, match=r"Glm4.*gives no hidden states of its layers"):
        make_vllm(folder, kv_cache_bytes=KV_CACHE_BYTES, feature_layers=LAYERS)


def test_a_cache_that_holds_no_sequence_is_refused_by_the_fields_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3-yarn")
    with pytest.raises(InvalidField, match="kv_cache_gb"):
        make_vllm(folder, kv_cache_bytes=2**19)
