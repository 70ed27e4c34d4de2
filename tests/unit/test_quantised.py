"""Block-quantised weights of GGUF files: their layouts, their products, and a model served as shipped."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.errors import ModelUnavailable
from cluster.private_folder import cache_folder
from drafters.layers import load_layers
from engine.batch_layout import PackedSpan
from engine.compiling import load_compiled
from engine.cpu import quantised as packing
from engine.cpu.build import HEADERS, SOURCES, load_library
from engine.cpu.quantised import _AT_ONCE, QuantisedLinear, _shared
from engine.cpu_level import AVX2, cpu_level
from engine.factory import load_model
from engine.forward import CausalModel
from engine.models.config import load_config
from engine.models.gguf_file import GgufFile, GgufTensors
from engine.models.prepare import packed_folder
from engine.models.quantised import BLOCKS, QuantisedMatrix, shipped_bytes
from engine.models.weights import DenseWeights, shipped_weights
from engine.ops import TorchOps
from tests.support.compiler import needs_compiler
from tests.support.gguf_files import K_FACTORS, add_tensors, k_matrix
from tests.support.gguf_files import KINDS as SHIPPED_KINDS
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

KINDS = [GGMLQuantizationType(kind) for kind in BLOCKS]
_NUM_IN = 512
_LARGEST = 127 * 256 + 127  # of inputs rounded to 16 bits


def raw_matrix(kind: GGMLQuantizationType, num_out: int) -> NDArray[np.uint8]:
    if kind in K_FACTORS:
        return k_matrix(kind, num_out, _NUM_IN)
    values = np.random.default_rng(int(kind)).standard_normal((num_out, _NUM_IN))
    return np.asarray(quantize(values.astype(np.float32), kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_have_the_values_that_ggml_gives_them(kind: GGMLQuantizationType) -> None:
    raw = raw_matrix(kind, 3)
    assert np.array_equal(QuantisedMatrix(kind, raw, _NUM_IN).dequantised().numpy(), dequantize(raw, kind))


def rows_are_independent(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """Whether rows have the same bits alone, in batches of every size up to 64, and in all of ``x``."""
    whole = product(x)
    return all(torch.equal(product(x[size : 2 * size]), whole[size : 2 * size]) for size in range(1, 65))


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_do_not_depend_on_the_number_of_rows(kind: GGMLQuantizationType) -> None:
    matrix, bias = QuantisedMatrix(kind, raw_matrix(kind, 70), _NUM_IN), torch.randn(70)
    product = QuantisedLinear(load_library(torch.float32), matrix, bias, torch.float32)
    torch.manual_seed(1)
    x = torch.randn(130, _NUM_IN)
    expected = x.double() @ matrix.dequantised().double().T + bias
    torch.testing.assert_close(product(x).double(), expected, rtol=0, atol=float(expected.abs().max()) * 1e-4)
    assert rows_are_independent(product, x)
    assert product._weights.nbytes <= shipped_bytes((kind,)) * 96 * _NUM_IN

    def rounded_together(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / _LARGEST
        return product((x / scale).round() * scale)

    assert not rows_are_independent(rounded_together, x)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **kwargs or {})
        self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


@needs_compiler
def test_packing_takes_little_memory_beside_the_weights() -> None:
    matrix = QuantisedMatrix(3, raw_matrix(GGMLQuantizationType.Q4_1, 32).repeat(2000, 0), _NUM_IN)
    with Largest() as largest:
        product = QuantisedLinear(load_library(torch.float32), matrix, None, torch.float32)
    assert largest.num_bytes <= 4 * _AT_ONCE
    x = torch.randn(1, _NUM_IN)
    assert torch.equal(product(x)[0, ::2000], product(x)[0, 1999::2000])


@needs_compiler
@pytest.mark.skipif(not cpu_level().includes(AVX2), reason="it may have no F16C")
def test_a_cpu_that_has_float16_but_no_avx2_reads_scales_rightly() -> None:
    matrix = QuantisedMatrix(GGMLQuantizationType.Q4_1, raw_matrix(GGMLQuantizationType.Q4_1, 40), _NUM_IN)
    sources = [source for source in SOURCES if source.name == "quantised.c"]
    library = load_compiled("ivybridge", sources, HEADERS, ["-DELEM_BF16=0", "-mno-avx2", "-mavx", "-mf16c"])
    x = torch.randn(2, _NUM_IN)
    found, expected = QuantisedLinear(library, matrix, None, torch.float32)(x), x @ matrix.dequantised().T
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) * 1e-4)


@needs_compiler
def test_matrices_of_different_types_are_one_product() -> None:
    kinds = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q4_0)
    parts = [QuantisedMatrix(kind, raw_matrix(kind, 20), _NUM_IN) for kind in kinds]
    product = QuantisedLinear(load_library(torch.float32), QuantisedMatrix.joined(parts), None, torch.float32)
    x = torch.randn(5, _NUM_IN)
    expected = torch.cat([x.double() @ part.dequantised().double().T for part in parts], 1)
    torch.testing.assert_close(product(x).double(), expected, rtol=0, atol=float(expected.abs().max()) * 1e-4)


@needs_compiler
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    matrix = QuantisedMatrix(GGMLQuantizationType.Q4_1, raw_matrix(GGMLQuantizationType.Q4_1, 40), _NUM_IN)
    product = QuantisedLinear(load_library(torch.float32), matrix, None, torch.float32)
    x = torch.randn(4, _NUM_IN)
    expected = product(x)
    x[1, 7], x[2] = float("inf"), 0
    found = product(x)
    assert found[1].isnan().all()
    assert not found[2].any()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])


@pytest.fixture(scope="module")
def shipped_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a GGUF file beside its other files, quantised as SmolLM2's is."""
    folder = tmp_path_factory.mktemp("shipped")
    write_tiny_model(folder, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    writer = GGUFWriter(folder / "model.gguf", "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    add_tensors(writer, tensors, {"self_attn.q_proj": 4, "self_attn.k_proj": 2}, quantised=True)
    return folder


def logits_in_parts(model: CausalModel, token_ids: tuple[int, ...], num: int) -> torch.Tensor:
    """Of all tokens, computed ``num`` at a time."""
    cache, table = model.new_cache(4), np.arange(4, dtype=np.int32)
    starts = range(0, len(token_ids), num)
    hidden = [model.forward([PackedSpan(at, token_ids[at : at + num], table)], cache) for at in starts]
    return model.logits(torch.cat(hidden))


def test_a_model_as_shipped_has_the_logits_of_its_weights_in_fp32(shipped_folder: Path) -> None:
    model, config = load_model(shipped_folder, "as-shipped"), load_config(shipped_folder)
    plain = CausalModel(
        config, shipped_weights(shipped_folder / "model.gguf", config), TorchOps(config, torch.float32), torch.float32
    )
    unquantised = load_model(shipped_folder, "float32")  # the control: what 4 bits have changed
    token_ids = tuple(range(3, 103))
    expected = logits_in_parts(_dense(shipped_folder), token_ids, 100)
    errors = [float((logits_in_parts(of, token_ids, 100) - expected).square().mean()) for of in (model, plain, unquantised)]
    assert max(errors[:2]) < 0.01 * errors[2]


@needs_compiler
def test_a_model_as_shipped_does_not_depend_on_how_its_rows_are_divided(shipped_folder: Path) -> None:
    model, token_ids = load_model(shipped_folder, "as-shipped"), tuple(range(3, 103))
    whole = logits_in_parts(model, token_ids, 100)
    assert all(torch.equal(logits_in_parts(model, token_ids, num), whole) for num in (1, 2, 7, 13, 64))


@needs_compiler
def test_processes_map_the_packed_weights_of_a_prepared_model(
    shipped_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(torch.float32, kv_dtype=torch.bfloat16)
    (tmp_path / "kernels").symlink_to(cache_folder() / "kernels")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    assert packed_folder(shipped_folder, shipped_folder / "model.gguf") is None
    folder, token_ids = tmp_path / "models" / "tiny", tuple(range(3, 20))
    shutil.copytree(shipped_folder, folder)
    packed = packed_folder(folder, folder / "model.gguf")
    assert packed is not None
    first, files = load_model(folder, "as-shipped"), {}
    expected = logits_in_parts(load_model(shipped_folder, "as-shipped"), token_ids, 17)
    for model in (first, load_model(folder, "as-shipped"), load_model(folder, "as-shipped", num_layers=1)):
        files = {file: file.stat().st_mtime_ns for file in packed.iterdir()} if model is first else files
        assert {file: file.stat().st_mtime_ns for file in packed.iterdir()} == files
        assert model.config.num_layers == 1 or torch.equal(logits_in_parts(model, token_ids, 17), expected)
    assert Path("/proc/self/maps").read_text().count(str(packed)) == len(files) + 4 + 1  # of one layer, and the head
    for old in (packed, folder / "model.gguf"):
        os.utime(old, ns=(0, 0))
    assert load_model(folder, "as-shipped")
    assert not packed.exists()
    assert torch.equal(logits_in_parts(first, token_ids, 17), expected)


@needs_compiler
def test_a_drafter_of_layers_reads_the_rows_of_a_gguf_file_in_place(shipped_folder: Path, tmp_path: Path) -> None:
    known, target = range(0, 257, 3), tmp_path / "target"
    shutil.copytree(shipped_folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    model, token_ids = load_layers(write_tiny_layers(tmp_path / "layers", shipped_folder, known), target, "int8", "cpu")
    assert token_ids is not None
    assert isinstance(model._table, QuantisedMatrix)
    whole, x = model._table.dequantised(), torch.randn(4, 64).to(torch.bfloat16)
    torch.testing.assert_close(model.logits(x).float(), x.float() @ whole[token_ids].T, rtol=0.02, atol=0.05)


WEIGHTS = torch.arange(200, dtype=torch.uint8)


@pytest.mark.parametrize("fault", ["cut off", "no folder", "full", "two at once", "killed"])
def test_packed_weights_are_right_whatever_lies_in_their_place(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, found = tmp_path / "packed-a", []
    path, is_private = folder / "weight", fault in ("no folder", "full")
    if fault == "no folder":
        folder.touch()
    elif fault == "full":
        monkeypatch.setattr(packing, "_LEFT_FREE", 2**60)
    else:
        folder.mkdir()
        path.write_bytes(b"half" if fault == "cut off" else b"")
        (folder / ".part-x").touch()
        os.utime(folder / ".part-x", (0, 0))

    def parts() -> Iterator[torch.Tensor]:
        yield WEIGHTS[:100]
        if fault == "two at once" and not found:
            found.append(path)
            assert torch.equal(_shared(path, 200, parts), WEIGHTS)
            found[:] = [path.stat().st_ino]
        yield WEIGHTS[100:]

    assert torch.equal(_shared(path, 200, parts), WEIGHTS)
    assert torch.equal(_shared(path, 200, parts), WEIGHTS)
    assert [entry.levelname for entry in caplog.records] == ["WARNING"] * is_private
    if not is_private:
        assert [file.name for file in folder.iterdir()] == ["weight"]
        assert not found or found == [path.stat().st_ino]


def test_only_old_layouts_are_removed_and_never_its_own(tmp_path: Path) -> None:
    """Which another process may have made since."""
    own, old, young = folders = [tmp_path / f"packed-{name}" for name in ("own", "old", "young")]
    for folder in folders:
        folder.mkdir()
        (folder / ".part-x").touch()
        os.utime(folder, (time.time() if folder is young else 0,) * 2)
    assert torch.equal(_shared(own / "weight", 200, lambda: iter([WEIGHTS])), WEIGHTS)
    assert sorted(os.listdir(own)) == [".part-x", "weight"]
    assert not old.exists()
    assert young.exists()


def _dense(folder: Path) -> CausalModel:
    """The same weights, dequantised by the ``gguf`` package's rule, in fp32."""
    config = load_config(folder)

    class Source:
        def read(
            self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
        ) -> torch.Tensor:
            tensor = tensors[name].float()
            if tensor.dim() < 2:
                return tensor
            kind = next((kind for part, kind in SHIPPED_KINDS.items() if part in name), GGMLQuantizationType.Q4_1)
            return torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))

    tensors = load_file(folder / "model.safetensors")
    return CausalModel(config, DenseWeights(config, Source(), torch.float32), TorchOps(config, torch.float32), torch.float32)


def test_a_rank_reads_its_rows_and_columns_of_restored_weights(shipped_folder: Path) -> None:
    file = GgufFile(shipped_folder / "model.gguf")
    for name in ("self_attn.q_proj", "self_attn.o_proj"):
        full = f"model.layers.1.{name}.weight"
        shape, source = file.tensors[full].shape, GgufTensors(file, torch.float32)
        whole = source.read(full, shape)
        assert torch.equal(source.read(full, shape, range(16, 48), range(8, 24)), whole[16:48, 8:24])
        assert torch.equal(whole, GgufTensors(file).read(full, shape).dequantised())


@pytest.mark.parametrize(
    ("kinds", "num_bytes"),
    [
        *([((2,), 0.5625), ((3,), 0.625), ((8,), 1.0625)] if cpu_level().includes(AVX2) else [((2,), 0.625), ((3,), 0.75)]),
        *([((12,), 0.75), ((14,), 1.25), ((12, 14), 1.5), ((0,), 4)]),
    ],
)
def test_weights_are_counted_as_they_are_kept(kinds: tuple[int, ...], num_bytes: float) -> None:
    assert shipped_bytes(kinds) == num_bytes


def test_a_folder_without_a_gguf_file_has_no_weights_as_shipped(tiny_model_folder: Path) -> None:
    with pytest.raises(ModelUnavailable, match="as-shipped"):
        load_model(tiny_model_folder, "as-shipped")
