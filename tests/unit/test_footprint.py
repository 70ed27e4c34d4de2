"""What drafters are said to need on a device, held against what they really take there."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import (
    CascadeOptions,
    DrafterConfig,
    DrafterOptions,
    HiddenStateOptions,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
)
from cluster.errors import ModelUnavailable
from drafters.footprint import PROCESS_BYTES, TORCH_BYTES, Footprint, footprint, vllm_weights
from drafters.shipped import shipped_options
from tests.support.compiler import needs_compiler
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

MB = 2**20
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read as Linux tells it")
TOLERANCE = 0.15  # of weights and caches: oneDNN fills up its panels, and the allocator keeps a little
SLACK_MB = 24  # what imports and first passes leave behind

# Loads a drafter, lets it fill its cache, and prints what that added to the resident memory; a tiny one comes first, so that
# what the process takes whatever it loads is there already. Pages of mapped files do not count: the system takes them back.
_LOAD = """
import ctypes, sys
from pathlib import Path
from cluster.config import DrafterConfig, LayersOptions
from cluster.types import ModelInfo, SamplingParams
from drafters.protocol import Demand
from drafters.registry import make_drafter
from engine.models.config import load_config
from engine.models.tokenizer import fingerprint

def load(raw, folder, num_requests, length):
    config = DrafterConfig.model_validate_json(raw)
    if isinstance(config.options, LayersOptions):
        config = config.model_copy(update={"options": config.options.of_target(folder)})
    shape = load_config(Path(folder))
    info = ModelInfo("t", shape.vocab_size, shape.max_len, shape.eos_token_ids, fingerprint(Path(folder)))
    drafter = make_drafter(config, info)
    for i in range(int(num_requests)):
        drafter.open(str(i), [1 + j % 200 for j in range(int(length))], 4, SamplingParams(max_tokens=8, temperature=0.0))
        drafter.propose([Demand(str(i), 2)])
    return drafter

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

tiny, folder, *large = sys.argv[1:]
first = load(tiny, folder, 1, 100)
before = resident()
second = load(*large)
print(resident() - before)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 75 MB in fp32: enough to be seen beside what a process takes anyway."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    return write_tiny_model(tmp_path_factory.mktemp("large"), num_layers=4, **shape)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def resident_bytes(tiny: Path, first: DrafterOptions, options: DrafterOptions, model: Path, num_requests: int) -> int:
    """Of a drafter in a process that has loaded a first one."""
    before, large = (DrafterConfig(name="d", options=one).model_dump_json() for one in (first, options))
    command = [sys.executable, "-c", _LOAD, before, str(tiny), large, str(model), str(num_requests), "500"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def check(said: Footprint, taken: int) -> None:
    expected = said.weight_bytes + said.cache_bytes
    assert abs(taken - expected) <= TOLERANCE * expected + SLACK_MB * MB, f"{taken / MB:.0f} MB for {expected / MB:.0f} MB"


@pytest.mark.slow
@linux
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_takes_what_it_was_said_to_take(model: Path, tiny: Path, dtype: str) -> None:
    options = ModelOptions.model_validate({"model": str(model), "dtype": dtype, "kv_cache_gb": 0.03})
    said = footprint(DrafterConfig(name="d", options=options), "cpu", 512)
    element = 4 if dtype == "float32" else 2
    num_requests = said.cache_bytes // (512 * 2 * 4 * 512 * element) + 1  # as many as fill the cache
    first = options.model_copy(update={"model": str(tiny), "kv_cache_gb": 0.001})
    check(said, resident_bytes(tiny, first, options, model, num_requests))


@pytest.mark.slow
@needs_compiler
@linux
def test_int8_layers_take_a_quarter_of_fp32(model: Path, tiny: Path, tmp_path: Path) -> None:
    folder = write_tiny_layers(tmp_path / "layers", model, range(128), num_layers=4)
    layers = LayersOptions(path=str(folder), kv_cache_gb=0.01).of_target(str(model))
    config = DrafterConfig(name="d", options=layers)
    said = footprint(config, "cpu", 512)
    whole = footprint(DrafterConfig(name="w", options=ModelOptions(model=str(model), dtype="float32")), "cpu", 512)
    assert said.weight_bytes == pytest.approx(whole.weight_bytes / 4, rel=0.05)
    few = write_tiny_layers(tmp_path / "few", tiny, range(128))
    first = layers.model_copy(update={"path": str(few), "target": str(tiny), "kv_cache_gb": 0.001})
    check(said, resident_bytes(tiny, first, layers, model, 4))
    assert footprint(config, "cuda", 512).weight_bytes > 1.9 * said.weight_bytes, "there it is bfloat16"


def test_a_drafter_takes_all_that_it_is_made_of(model: Path) -> None:
    def of(options: DrafterOptions, *proposers: DrafterConfig) -> Footprint:
        return footprint(DrafterConfig(name="d", options=options, capacity=2), "cpu", 100, proposers)

    small = ModelOptions(model=str(model), num_layers=1, kv_cache_gb=0.01)
    large = ModelOptions(model=str(model), kv_cache_gb=0.02)
    both = of(small).weight_bytes + of(large).weight_bytes
    assert of(small).weight_bytes < of(large).weight_bytes
    assert of(CascadeOptions(members=(NgramOptions(), small))).weight_bytes == of(small).weight_bytes
    assert of(large, DrafterConfig(name="small", options=small)).weight_bytes == both
    assert of(large).process_bytes == PROCESS_BYTES + TORCH_BYTES
    assert of(NgramOptions()).process_bytes == PROCESS_BYTES


def test_lookups_take_what_they_remember() -> None:
    def of(options: DrafterOptions, capacity: int = 2) -> Footprint:
        return footprint(DrafterConfig(name="d", options=options, capacity=capacity), "cpu", 100)

    assert (
        of(SuffixOptions(max_shared_tokens=20_000)).cache_bytes
        == 2 * of(SuffixOptions(max_shared_tokens=10_000)).cache_bytes
    )
    assert of(TableOptions()).cache_bytes > 0
    assert of(NgramOptions(), capacity=4).request_bytes == 2 * of(NgramOptions()).request_bytes
    assert of(TableOptions(path="table")).weight_bytes > 0


def test_files_that_are_no_weights_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="nowhere"):
        footprint(DrafterConfig(name="d", options=ModelOptions(model=str(tmp_path / "nowhere"))), "cpu", 100)
    folder = write_tiny_layers(tmp_path / "layers", model, range(128))
    (folder / "model.safetensors").write_bytes(b"half")
    config = DrafterConfig(name="d", options=LayersOptions(path=str(folder)).of_target(str(model)))
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is not a whole safetensors file"):
        footprint(config, "cpu", 100)


@pytest.mark.parametrize("header_len", [2, 2**40, 2**64 - 1])
def test_a_header_that_is_none_is_named(header_len: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_len.to_bytes(8, "little") + b"[]")
    with pytest.raises(ModelUnavailable, match="not a whole safetensors file"):
        vllm_weights(tmp_path, 2)


@needs_compiler
def test_what_is_said_of_a_shipped_block_drafter_is_near_its_file() -> None:
    name = next(name for name, options in shipped_options("smollm2-135m").items() if isinstance(options, HiddenStateOptions))
    said = footprint(DrafterConfig(name="d", options=HiddenStateOptions(path=name)), "cpu", 2048)
    assert said.weight_bytes == pytest.approx(said.stored_bytes, rel=0.2)  # stored as int8, and held so
