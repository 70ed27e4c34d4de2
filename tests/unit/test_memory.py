"""Whether a deployment fits is known before anything is started."""

import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import save_file

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    HiddenStateOptions,
    ModelConfig,
    Resources,
    TableOptions,
    TargetConfig,
)
from deploy.local_ray import LaunchError
from deploy.memory import BASE_BYTES, cached_tokens, check_memory, sized
from drafters import footprint
from drafters.footprint import CUDA_BYTES, VLLM_BYTES, target_footprint, target_footprints
from drafters.registry import feature_layers
from engine.dtypes import choose_dtype, held_dtype
from engine.kv_cache import num_blocks_for
from engine.model_facts import ModelFacts, read_facts
from engine.model_facts import max_model_len as max_model_len_of
from engine.models.config import load_config
from engine.models.prepare import ensure_model
from tests.support.compiler import needs_compiler
from tests.support.cpu_levels import pretend
from tests.support.dspark import write_dspark, write_speculators
from tests.support.tiny_model import write_tiny_model

GB = 2**30


def config_of(folder: Path, *drafters: DrafterConfig, **target: object) -> Config:
    return Config(
        model=ModelConfig(name=str(folder), max_model_len=64),
        target=TargetConfig.model_validate({"device": "cpu", "kv_cache_gb": 0.25, **target}),
        drafters=drafters,
    )


def dspark(tmp_path: Path, folder: Path) -> DrafterConfig:
    options = HiddenStateOptions(path=str(write_dspark(tmp_path / "dspark", folder)), kv_cache_gb=0.01)
    return DrafterConfig(name="block", options=CascadeOptions(members=(options, TableOptions())))


def free(monkeypatch: pytest.MonkeyPatch, gb: float) -> None:
    monkeypatch.setattr("deploy.memory.available_memory_bytes", lambda: int(gb * GB))


def asked(config: Config, free_gb: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """GB that are said to be needed where they are not free."""
    free(monkeypatch, free_gb)
    with pytest.raises(LaunchError, match=r"lower target.kv_cache_gb") as refused:
        check_memory(config)
    found = re.search(r"needs about ([\d.]+) GB .*, ([\d.]+) GB are free", str(refused.value))
    assert found
    assert float(found[2]) == pytest.approx(free_gb, abs=0.05)
    return float(found[1])


def test_caches_and_replicas_count(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = asked(config_of(tiny_model_folder, kv_cache_gb=4), 1, monkeypatch)
    assert 4 + BASE_BYTES / GB < one < 5 + BASE_BYTES / GB
    two = asked(config_of(tiny_model_folder, kv_cache_gb=4, replicas=2), 1, monkeypatch)
    assert 4 < two - one < 5


def test_the_longest_sequence_is_what_model_and_cache_allow(tiny_model_folder: Path) -> None:
    """A model of 512 tokens, 64 bytes a token and layer in bf16, in blocks of 32; one block is for padding."""

    def longest(max_model_len: int | str, kv_cache_gb: float = 0.25) -> int:
        config = config_of(tiny_model_folder, dtype="bfloat16", kv_cache_gb=kv_cache_gb)
        model = ModelConfig.model_validate({"name": str(tiny_model_folder), "max_model_len": max_model_len})
        config = config.model_copy(update={"model": model})
        return max_model_len_of(config, read_facts(config, tiny_model_folder))

    assert longest("auto") == 512
    assert longest("auto", 11 * 32 * 128 / GB) == 10 * 32
    assert (longest(64), longest(4096)) == (64, 512)


def test_what_fits_may_start(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 6)
    check_memory(config_of(tiny_model_folder, kv_cache_gb=4))
    free(monkeypatch, 0)
    check_memory(config_of(tiny_model_folder, device="cuda"))
    with (
        mock.patch("deploy.memory.torch_has_cuda", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        check_memory(config_of(tiny_model_folder, device="auto"))
        with pytest.raises(LaunchError, match="needs about"):
            check_memory(config_of(tiny_model_folder, device="auto", replicas=2))


def on_gpu(folder: Path, *drafters: DrafterConfig, **target: object) -> Config:
    target = {"device": "cuda", "kv_cache_gb": "auto", "resources": Resources(gpus=1.0), **target}
    config = Config(target=TargetConfig.model_validate(target), drafters=drafters)
    return config.model_copy(update={"model": ModelConfig(name=str(folder), max_model_len="auto")})


def facts_of(folder: Path) -> ModelFacts:
    return read_facts(on_gpu(folder), folder)


@pytest.mark.parametrize(("share", "utilization"), [(1.0, 0.9), (0.5, 0.9), (1.0, 0.3)])
def test_the_kv_cache_takes_what_the_rest_leaves_of_a_gpu(
    share: float, utilization: float, tmp_path: Path, tiny_model_folder: Path
) -> None:
    drafter = dspark(tmp_path, tiny_model_folder)
    target = {"resources": Resources(gpus=share), "gpu_memory_utilization": utilization}
    for drafters in ((), (drafter,)):
        config = sized(on_gpu(tiny_model_folder, *drafters, **target), facts_of(tiny_model_folder), 8 * GB)
        own, beside = target_footprints(config, facts_of(tiny_model_folder))
        assert own.process_bytes == CUDA_BYTES
        assert own.total + beside.total == pytest.approx(8 * GB * share * utilization, abs=10_000)
        assert own.pass_bytes > 64 * 17 * 257 * (2 + 8)
        assert config.model.max_model_len == 512
    assert sized(config, facts_of(tiny_model_folder), 8 * GB) == config, "sizes stay"


@pytest.mark.parametrize(("partition", "num_lanes"), [("off", 1), ("auto", 4)])
def test_rounds_that_are_recorded_for_each_lane_count(
    partition: str, num_lanes: int, tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Steps of EAGLE-3 with up to 8 tokens: 1, 2, 4, 6 and 8; behind the first 16 tables, each for 127 drafts in all, of 16
    blocks of 32 tokens."""
    write_speculators(tmp_path / "eagle", tiny_model_folder, "eagle3", target_layer_ids=(0,))

    def rounds(max_draft_len: int) -> int:
        options = HiddenStateOptions(kind="eagle3", path=str(tmp_path / "eagle"), kv_cache_gb=0.01)
        drafter = DrafterConfig(name="e", options=options, max_draft_len=max_draft_len)
        config = on_gpu(tiny_model_folder, drafter, partition=partition)
        return target_footprints(config, facts_of(tiny_model_folder))[1].pass_bytes

    assert rounds(8) == 16 * 127 * 16 * 4 * num_lanes
    assert rounds(1) == 0


def test_vllm_gets_the_share_that_its_own_profile_may_take(tmp_path: Path, tiny_model_folder: Path) -> None:
    drafter, facts = dspark(tmp_path, tiny_model_folder), facts_of(tiny_model_folder)
    plain, drafted = (
        sized(on_gpu(tiny_model_folder, *drafters, engine="vllm"), facts, 8 * GB).target for drafters in ((), (drafter,))
    )
    longest = on_gpu(tiny_model_folder, engine="vllm").changed(model={"max_model_len": 512})
    windowed = replace(facts, kv_bytes_per_token=GB // 10)  # an upper bound
    assert sized(longest, windowed, 8 * GB).model.max_model_len == 512
    assert (plain.kv_cache_gb, drafted.kv_cache_gb) == ("auto", "auto")
    assert cached_tokens(on_gpu(tiny_model_folder, replicas=3), facts, GB) == 3 * GB / facts.kv_bytes_per_token
    assert cached_tokens(on_gpu(tiny_model_folder), facts, None) == math.inf
    assert plain.gpu_memory_utilization == pytest.approx(0.9)
    hidden_states = (
        0.9 * len(feature_layers([drafter], tiny_model_folder)) * 32 * 2 / (128 + 128)
    )  # beside 128 bytes of keys and values a token
    assert 0.9 - hidden_states - 0.05 < drafted.gpu_memory_utilization < 0.9 - hidden_states + 0.05


@pytest.mark.parametrize(
    ("target", "gpu_bytes", "says"),
    [
        (
            {},
            GB // 2,
            "may take 0.45 GB: weights 0.00, the largest pass 0.01, CUDA 0.59, a KV cache of 1 tokens 0.00; raise",
        ),
        ({"kv_cache_gb": 2.0}, 2 * GB, "may take 2.00 GB: .*CUDA 0.59, a KV cache of 16777216 tokens 2.00; raise"),
        ({"engine": "vllm", "kv_cache_gb": 2.0}, 2 * GB, "a KV cache of 16777216 tokens 2.00; raise"),
    ],
)
def test_a_target_that_its_gpu_cannot_hold_says_what_takes_how_much(
    target: dict[str, object], gpu_bytes: int, says: str, tiny_model_folder: Path
) -> None:
    with pytest.raises(LaunchError, match=says):
        sized(on_gpu(tiny_model_folder, **target), facts_of(tiny_model_folder), gpu_bytes)
    assert sized(on_gpu(tiny_model_folder, **target), facts_of(tiny_model_folder), None).target.device == "cuda"


def test_vllm_counts_and_holds_the_dtype_that_it_computes_in(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "avx2")
    native = config_of(tiny_model_folder, dtype="float32")
    vllm = config_of(tiny_model_folder, dtype="auto", engine="vllm")
    native_total, facts = target_footprint(native).total, read_facts(native, tiny_model_folder)
    monkeypatch.setattr(footprint, "read_facts", lambda config, folder: facts)  # vLLM is in another environment
    head_bytes = 257 * 32 * 4  # tied, which the native engine holds twice
    assert target_footprint(vllm).total - native_total == VLLM_BYTES - head_bytes


def test_quantised_weights_on_vllm_count_as_they_are_stored(tmp_path: Path) -> None:
    import torch

    tensors = {
        "a.weight": torch.zeros(64, 32, dtype=torch.int8),
        "a.weight_scale": torch.zeros(64, 1, dtype=torch.bfloat16),
        "b.weight": torch.zeros(10, 10, dtype=torch.float32),
        "embed.weight": torch.zeros(10, 5, dtype=torch.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert footprint.vllm_weights(tmp_path, 4).weight_bytes == 64 * 32 + 64 * 4 + 150 * 4
    assert footprint.vllm_weights(tmp_path, 2, "awq").weight_bytes == 64 * 32 + 64 * 2 + 150 * 2
    assert footprint.vllm_weights(tmp_path, 2, "fp8_per_block").weight_bytes == 64 * 32 + 64 + 100 + 50 * 2
    (tmp_path / "model.gguf").write_bytes(b"x" * 1000)
    (tmp_path / "model.safetensors").unlink()
    assert footprint.vllm_weights(tmp_path, 2).weight_bytes == 1000


def test_weights_that_vllm_keeps_beside_the_gpu_leave_their_room(tiny_model_folder: Path) -> None:
    configs = (on_gpu(tiny_model_folder, engine="vllm", vllm=vllm) for vllm in ({}, {"cpu_offload_gb": 3e-5}))
    own, less = (target_footprints(one, facts_of(tiny_model_folder))[0] for one in configs)
    assert own.weight_bytes - less.weight_bytes == pytest.approx(3e-5 * GB, abs=1)


def test_hidden_states_that_are_kept_for_a_drafter_count(tmp_path: Path, tiny_model_folder: Path) -> None:
    """One row for each token of the KV cache, of every layer that the drafter reads."""
    drafter = dspark(tmp_path, tiny_model_folder)
    plain = target_footprint(config_of(tiny_model_folder))
    kept = target_footprint(config_of(tiny_model_folder, drafter))
    model = load_config(tiny_model_folder)
    import torch

    num_tokens = 32 * num_blocks_for(model, GB // 4, torch.bfloat16, 32)
    rows = num_tokens * len(feature_layers([drafter], tiny_model_folder)) * model.hidden_size * 2
    own = 0.01 * GB + 60 * 2**20  # the drafter's KV cache, and what its table may learn
    assert rows > 100 * 2**20
    assert rows < kept.cache_bytes - plain.cache_bytes < rows + own + 10 * 2**20


def test_every_rank_counts_with_its_part_of_the_weights(tmp_path: Path) -> None:
    """The first rank holds two of three key-value heads, and so as many tokens as fit its cache."""
    folder = write_tiny_model(tmp_path / "model", hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
    whole = config_of(folder)
    two = whole.model_copy(update={"target": whole.target.model_copy(update={"tensor_parallel": 2})})
    assert target_footprint(two).weight_bytes == target_footprint(whole).weight_bytes * 2 // 3
    assert target_footprint(two).cache_bytes == target_footprint(whole).cache_bytes


@pytest.mark.parametrize(
    ("dtype", "level", "has_compiler", "expected"),
    [
        ("bfloat16", "avx2", True, "bfloat16"),
        ("int8", "generic", True, "int8"),
        ("auto", "avx2", True, "bfloat16"),
        ("float32", "amx", False, "float32"),
        ("bfloat16", "avx512_bf16", False, "bfloat16"),
        ("int8", "avx512_bf16", False, "bfloat16"),
        ("bfloat16", "avx512", False, "float32"),
        ("int8", "avx2", False, "float32"),
        ("auto", "generic", False, "float32"),
        ("as-shipped", "avx2", True, "as-shipped"),
        ("as-shipped", "amx", False, "float32"),
    ],
)
def test_the_dtype_that_weights_are_held_in(
    dtype: str, level: str, has_compiler: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, level, "amx", kernels=has_compiler)
    assert held_dtype(dtype) == expected


@pytest.mark.model
@needs_compiler
@pytest.mark.usefixtures("model_folder")
def test_weights_as_shipped_are_counted_by_their_blocks() -> None:
    """Layers of 4 bits with two halves for 32 weights, and the head of 8 bits with one, beside the embedding in the file."""
    counted, wider = (
        target_footprint(config_of(ensure_model("smollm2-135m"), dtype=dtype)) for dtype in ("as-shipped", "bfloat16")
    )
    assert counted.stored_bytes == wider.stored_bytes < 10**8
    embedding = 49152 * 576
    layers = wider.weight_bytes / 2 - 2 * embedding
    assert counted.weight_bytes == pytest.approx(0.625 * layers + 2 * 1.0625 * embedding, rel=0.01)


@pytest.mark.model
def test_wider_weights_for_want_of_a_compiler_are_counted_and_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of 135 million parameters, whose embedding stays as it is stored."""
    config = config_of(model_folder)
    pretend(monkeypatch, "avx2")
    narrow = target_footprint(config).weight_bytes
    pretend(monkeypatch, "avx2", kernels=False)
    assert 1.7 < target_footprint(config).weight_bytes / narrow < 2.1
    free(monkeypatch, 0)
    with pytest.raises(LaunchError, match=r"weights are held in float32, since kernels are not available: no C compiler"):
        check_memory(config)


@pytest.mark.parametrize(("tied", "num_ranks", "num_heads"), [(True, 1, 0), (False, 1, 1), (True, 2, 1)])
def test_early_exit_counts_with_the_head_that_it_holds(tied: bool, num_ranks: int, num_heads: int, tmp_path: Path) -> None:
    """Whole on the first rank, which has a shard: beside two lenses of 48 x 48, their sums, and a head of 1,024 tokens."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    folder = write_tiny_model(tmp_path / "model", **sizes)
    whole = config_of(folder, dtype="float32", tensor_parallel=num_ranks)
    exits = whole.model_copy(update={"target": whole.target.model_copy(update={"early_exit": "auto"})})
    own = 4 * (1024 * 48 + 2 * (48 * 48 + 49 * 97))
    assert target_footprint(exits).weight_bytes - target_footprint(whole).weight_bytes == own + num_heads * 4 * 257 * 48


def test_places_of_adapters_count(tiny_model_folder: Path) -> None:
    shapes = footprint._shapes(tiny_model_folder)
    matrices = [sum(shape) for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name]
    width = sum(matrices) + 3 * (257 + 32)
    for device, copies in (("cuda", 1), ("cpu", 2)):
        places = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
        config = config_of(tiny_model_folder, engine="vllm", device=device, vllm=places)
        plain = config_of(tiny_model_folder, engine="vllm", device=device)
        one, other = (target_footprints(each, facts_of(tiny_model_folder))[0] for each in (config, plain))
        element = 2 if device == "cuda" else footprint.DTYPE_BYTES[choose_dtype("auto", "cpu", engine="vllm")]
        assert one.weight_bytes - other.weight_bytes == 3 * 8 * width * element * copies
