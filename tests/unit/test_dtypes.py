"""What ``dtype: auto`` is, by device, compiler and CPU level; and what torch then multiplies in."""

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    HiddenStateOptions,
    LayersOptions,
    ModelConfig,
    ModelOptions,
    NgramOptions,
)
from engine import dtypes
from engine.compiling import NoCompiler
from engine.cpu.packed import packed_linear, product_dtype
from engine.cpu_level import AVX2, AVX512_BF16, machine_level, possible_levels
from engine.dtypes import choose_dtype, resolve_dtypes
from engine.factory import make_ops
from engine.models.config import load_config
from engine.models.manifest import TENSORS
from engine.models.weights import LinearWeight
from engine.ops import TorchOps
from tests.support.compiler import needs_compiler
from tests.support.cpu_levels import ROOT, environment_of, pretend

CPU = torch.device("cpu")


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, level = request.param
    dtypes._log.cache_clear()
    pretend(monkeypatch, level, kernels=compiler is not None)


CASES = [
    (("/usr/bin/cc", AVX2), "cpu", "bfloat16", "int8"),
    (("/usr/bin/cc", AVX512_BF16), "cpu", "bfloat16", "int8"),
    ((None, AVX512_BF16), "cpu", "bfloat16", "bfloat16"),
    ((None, AVX2), "cpu", "float32", "float32"),
    ((None, AVX2), "cuda", "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize(("machine", "device", "of_target", "of_drafter"), CASES, indirect=["machine"], ids=str)
def test_auto_is_the_fastest_that_keeps_the_targets_weights(
    machine: None, device: str, of_target: str, of_drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine.dtypes"):
        for _ in range(2):
            assert choose_dtype("auto", device) == of_target
            assert choose_dtype("auto", device, allows_int8=True) == of_drafter
    said = [record.getMessage() for record in caplog.records]
    assert all(f"is {one}" in message for one, message in zip((of_target, of_drafter), said, strict=True))
    assert choose_dtype("float32", device) == "float32"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(("/usr/bin/cc", AVX2), "float32"), (("/usr/bin/cc", AVX512_BF16), "bfloat16")],
    indirect=["machine"],
    ids=str,
)
def test_vllm_computes_without_our_kernels(machine: None, expected: str) -> None:
    assert choose_dtype("auto", "cpu", engine="vllm") == expected


@pytest.mark.parametrize("machine", [("/usr/bin/cc", AVX2)], indirect=True)
def test_a_launcher_chooses_for_target_and_drafters_at_any_depth(machine: None) -> None:
    model = ModelOptions(model="m")
    layers = LayersOptions(path="p")
    cascade = CascadeOptions(
        members=(NgramOptions(), HiddenStateOptions(path="p"), HiddenStateOptions(path="q", dtype="float32"))
    )
    everything = [NgramOptions(), model, layers, cascade]
    pool = tuple(DrafterConfig(name=f"d{i}", options=one) for i, one in enumerate(everything))
    config = Config(model=ModelConfig(name="not/there"), drafters=pool)
    resolved = resolve_dtypes(config)
    assert resolved.target.dtype == "bfloat16"
    _, of_model, of_layers, of_cascade = (drafter.options for drafter in resolved.drafters)
    assert isinstance(of_model, ModelOptions)
    assert of_model.dtype == "bfloat16"
    assert isinstance(of_layers, LayersOptions)
    assert of_layers.dtype == "int8"
    assert isinstance(of_cascade, CascadeOptions)
    assert [getattr(member, "dtype", None) for member in of_cascade.members] == [None, "int8", "float32"]
    assert resolve_dtypes(resolved) == resolved


SHIPPED = {"model.embed_tokens.weight": [[8, 4], 1.0625], "model.norm.weight": [[4], 4.0]}
CC = "/usr/bin/cc"


@pytest.mark.parametrize(
    ("machine", "tensors", "fields", "expected"),
    [
        ((CC, AVX2), SHIPPED, {}, "as-shipped"),
        ((CC, AVX2), SHIPPED, {"dtype": "bfloat16"}, "bfloat16"),
        ((CC, AVX2), SHIPPED, {"tensor_parallel": 2}, "bfloat16"),
        ((CC, AVX2), SHIPPED, {"early_exit": "auto"}, "bfloat16"),
        ((CC, AVX2), {"model.norm.weight": [[4], 4.0]}, {}, "bfloat16"),
        ((CC, AVX2), None, {}, "bfloat16"),
        ((CC, AVX512_BF16), SHIPPED, {}, "bfloat16"),
        ((None, AVX2), SHIPPED, {}, "float32"),
    ],
    indirect=["machine"],
    ids=str,
)
def test_auto_is_as_shipped_where_that_is_fastest(
    machine: None, tensors: object, fields: dict[str, object], expected: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    if tensors is not None:
        (folder / TENSORS).write_text(json.dumps(tensors))
        (folder / "model.gguf").touch()
    target = {"device": "cpu", "engine": "native"} | fields
    layers = {"name": "layers", "device": "cpu", "options": {"kind": "model", "model": str(folder), "num_layers": 1}}
    config = Config.model_validate({"model": {"name": str(folder)}, "target": target, "drafters": (layers,)})
    resolved = resolve_dtypes(config)
    assert resolved.target.dtype == expected
    assert getattr(resolved.drafters[0].options, "dtype", None) == expected  # it shares the target's


@pytest.mark.parametrize("biased", [False, True])
def test_torch_multiplies_bfloat16_in_fp32_where_it_is_slow(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where oneDNN would lay out weights in bfloat16, as on this machine perhaps."""
    pretend(monkeypatch, AVX2)
    assert product_dtype(torch.bfloat16, CPU) == torch.float32
    assert product_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    kinds = []
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def lay_out(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        kinds.append(weight.dtype)
        return reorder(weight, num_rows)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lay_out)
    torch.manual_seed(0)
    weight, x = torch.randn(37, 100).to(torch.bfloat16), torch.randn(5, 100).to(torch.bfloat16)
    bias = torch.randn(37).to(torch.bfloat16) if biased else None
    ours = packed_linear(LinearWeight(weight, bias))(x)
    assert ours.dtype == torch.bfloat16
    assert kinds == [torch.float32]
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=5e-2)


CHOICES = """
from engine.dtypes import choose_dtype
from engine.dtypes import held_dtype
import logging
logging.basicConfig(level=logging.INFO)
print(choose_dtype("auto", "cpu"), choose_dtype("auto", "cpu", allows_int8=True), held_dtype("bfloat16"))
"""


@needs_compiler
@pytest.mark.skipif("avx2" not in possible_levels(machine_level()), reason="needs AVX2")
def test_a_compiler_without_a_cache_folder_makes_no_kernels() -> None:
    """In a process of its own, since whether there are kernels is found out once."""
    environment = environment_of("avx2") | {"XDG_CACHE_HOME": "/proc/none"}
    environment.pop("OUTRIDER_HOME", None)
    done = subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.split() == ["float32"] * 3, done.stderr
    assert "without our kernels: the library tile_sizes cannot be built or loaded: " in done.stderr
    assert "/proc/none" in done.stderr


def test_the_log_says_what_weights_are_held_in_without_kernels(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: object, **__: object) -> None:
        raise NoCompiler("no C compiler found")

    monkeypatch.setattr("engine.cpu.ops.load_library", unavailable)
    pretend(monkeypatch, AVX2)
    config = replace(load_config(tiny_model_folder), head_dim=64)
    assert type(make_ops(config, torch.bfloat16, CPU)) is TorchOps
    assert "several times slower: no C compiler found; weights are held in float32" in caplog.text
