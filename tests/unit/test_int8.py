"""Matrices as int8: how they are stored and read back, what is refused, and products with them against the float ones."""

import json
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.errors import ModelUnavailable
from cluster.sampling_params import SamplingParams
from drafters.hidden_states.checkpoint import load_network, save_network
from drafters.layers import load_layers
from drafters.protocol import Demand
from engine import compiling
from engine.batch_layout import PackedSpan
from engine.cpu import build
from engine.cpu.gumbel_argmax import CpuGumbelArgmax
from engine.cpu.native_product import Int8Linear
from engine.models.int8 import quantise
from engine.models.weights import LinearWeight
from engine.noise import noise_keys
from tests.reference.noise import gumbel_of_few
from tests.support.compiler import needs_compiler
from tests.support.dspark import make_dspark, target_rows, write_dspark
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

ALL_X86 = ("-mno-avx512vnni", "-mno-avx512f", "-mno-avxvnni")
# What each sort of CPU computes with, as far as this one can play it. "other" is the code for CPUs that are not x86.
CPUS = {
    "own": (),
    "avx512": ALL_X86[:1],
    "avxvnni": ALL_X86[:2],
    "avx2": ALL_X86,
    "sse2": ("-mno-avx2", *ALL_X86),
    "other": ("-mno-avx2", *ALL_X86, "-U__SSE2__"),
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def exact(x: Tensor, weight: LinearWeight) -> Tensor:
    matrix = quantise(weight.weight, uneven=weight.uneven).dequantised().double()
    return x.double() @ matrix.T + (0 if weight.bias is None else weight.bias.double())


def random_weight(num_out: int, num_in: int, *, biased: bool = True, uneven: bool = False) -> LinearWeight:
    return LinearWeight(torch.randn(num_out, num_in), torch.randn(num_out) if biased else None, uneven)


def assert_products_are_close(product: Int8Linear, x: Tensor, weight: LinearWeight) -> None:
    expected = exact(x, weight)
    size = float(expected.square().mean().sqrt()) + 1e-6
    assert float((product.logits(x) - expected).abs().max()) < 1e-3 * size
    in_dtype = product(x)
    assert in_dtype.dtype == x.dtype
    assert float((in_dtype - expected).abs().max()) < (2e-2 if x.dtype == torch.bfloat16 else 1e-3) * (size + 3)


@needs_compiler
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (37, 100), (64, 48), (129, 67)])
def test_products_of_all_numbers_of_rows(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_out)
    weight = random_weight(num_out, num_in)
    product = Int8Linear(build.load_library(dtype), weight, dtype)
    for rows in (*range(1, 65), 129):
        assert_products_are_close(product, torch.randn(rows, num_in).to(dtype), weight)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other ways to multiply are those of other x86 CPUs")
@pytest.mark.parametrize("cpu", CPUS)
def test_every_instruction_set_computes_the_same(
    cpu: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_FLAGS", (*compiling._FLAGS, *CPUS[cpu]))
    monkeypatch.setattr(build, "SOURCES", [path for path in build.SOURCES if path.name == "products.c"])
    torch.manual_seed(0)
    library = build.load_library(dtype, tmp_path)
    for num_out, num_in in ((70, 130), (33, 1), (40, 1100)):
        weight = random_weight(num_out, num_in, uneven=True)
        x = torch.randn(9, num_in).to(dtype)
        x[3] *= 1000
        x[4] = 0
        product = Int8Linear(library, weight, dtype)
        alone = torch.cat([product.logits(x[row : row + 1]) for row in range(9)])
        for num in range(1, 10):
            assert torch.equal(product.logits(x[:num]), alone[:num])
        for row in range(9):  # each by its own size
            assert_products_are_close(product, x[row : row + 1], weight)
    if dtype == torch.float32:  # the largest sums do not overflow
        product = Int8Linear(library, LinearWeight(torch.ones(32, 4096), None), dtype)
        torch.testing.assert_close(product(torch.ones(5, 4096)), torch.full((5, 32), 4096.0))


@needs_compiler
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    product = Int8Linear(build.load_library(dtype), random_weight(100, 80), dtype)
    x = torch.randn(30, 80).to(dtype)
    together = product.logits(x)
    assert all(torch.equal(product.logits(x[i : i + n]), together[i : i + n]) for i, n in ((0, 1), (3, 7), (11, 9), (29, 1)))


@needs_compiler
def test_a_sum_with_rows_that_lie_apart(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    product = Int8Linear(build.load_library(dtype), random_weight(50, 16, biased=False), dtype)
    x, base = torch.randn(4, 16).to(dtype), torch.randn(4, 3, 50)
    torch.testing.assert_close(product.logits(x, base[:, 1]), product.logits(x) + base[:, 1])


@needs_compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 99])
def test_a_row_that_holds_no_number_stays_one_that_holds_none(bad: float, at: int, dtype: torch.dtype) -> None:
    x = torch.ones(3, 100).to(dtype)
    x[1, at] = bad
    y = Int8Linear(build.load_library(dtype), random_weight(40, 100), dtype)(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("uneven", [False, True])
def test_quantising_again_what_was_read_back_changes_next_to_nothing(uneven: bool) -> None:
    """So how a file stores weights and how they are computed with are independent."""
    torch.manual_seed(3)
    weight = torch.randn(200, 300) * torch.exp2(torch.randint(-8, 8, (300,)) if uneven else torch.zeros(300))
    weight[7] = 0
    first = quantise(weight, uneven=uneven)
    for kind in (torch.float32, torch.bfloat16):
        again = quantise(first.dequantised().to(kind), uneven=uneven)
        different = (again.weight.int() - first.weight.int()).abs()
        assert int(different.max()) == 0 if kind == torch.float32 else float(different.float().mean()) < 0.01
        error = (again.dequantised() - first.dequantised()).norm() / first.dequantised().norm()
        assert float(error) < (1e-6 if kind == torch.float32 else 0.004)


def test_small_weights_of_large_inputs_survive() -> None:
    torch.manual_seed(4)
    sizes = torch.ones(256)
    sizes[17] = 2000.0
    weight, x = torch.randn(64, 256) / sizes, torch.randn(50, 256) * sizes
    expected = x @ weight.T
    errors = [float((x @ quantise(weight, uneven=u).dequantised().T - expected).norm() / expected.norm()) for u in (0, 1)]
    assert errors[1] < 0.02 < errors[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3, hidden_size=64, intermediate_size=96)


def saved_int8(folder: Path, target: Path, **changes: object) -> Path:
    """A random drafter, stored as int8."""
    written = write_dspark(folder / "float", target, **changes)
    network = load_network(written, target_rows(target))
    save_network(network, folder / "int8", json.loads((written / "config.json").read_text()), "int8")
    return folder / "int8"


@pytest.mark.parametrize("changes", [{}, {"anchor_input": True, "anchor_input_rank": 12}, {"anchor_input": True}], ids=str)
def test_a_network_is_read_back_from_half_the_bytes(changes: dict[str, object], tmp_path: Path, target: Path) -> None:
    folder = saved_int8(tmp_path, target, **changes)
    rows = target_rows(target)
    before, after = (load_network(path, rows).state_dict() for path in (tmp_path / "float", folder))
    for name, tensor in before.items():
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            assert float((after[name] - tensor).norm() / tensor.norm()) < 0.02, name
    tensors = load_file(folder / "model.safetensors")
    of_features = "anchor_input.reduce.weight" if "anchor_input_rank" in changes else "anchor_input.maps.weight"
    uneven = {"fc.weight_columns"} | ({of_features + "_columns"} if changes else set())
    assert {name for name in tensors if name.endswith("_columns")} == uneven
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name != "confidence_head.proj.weight":
            assert tensor.dtype == torch.int8
            assert tensors[name + "_scale"].shape == (len(tensor),)
        else:
            assert tensor.dtype == (torch.float32 if name.endswith(("_scale", "_columns")) else torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fc.weight_scale": None}, "no tensor fc.weight_scale"),
        ({"fc.weight_scale": torch.ones(3)}, r"fc.weight_scale has shape \(3,\), expected \(64,\)"),
        ({"fc.weight_scale": torch.full((64,), torch.nan)}, "fc.weight_scale holds scales that are no positive numbers"),
        ({"fc.weight_columns": -torch.ones(128)}, "fc.weight_columns holds scales that are no positive numbers"),
        ({"fc.weight_columns": torch.ones(1)}, r"fc.weight_columns has shape \(1,\), expected \(128,\)"),
        ({"fc.weight": torch.ones(64, 128, dtype=torch.int32)}, "fc.weight holds torch.int32, which is not supported"),
        ({"fc.bias": torch.ones(64, dtype=torch.int8)}, "fc.bias is int8, but no matrix"),
        ({"fc.weight": torch.ones(64, 64, dtype=torch.int8)}, r"fc.weight has shape \(64, 64\), expected \(64, 128\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files_are_refused_in_one_line(
    changes: dict[str, Tensor | None], reason: str, tmp_path: Path, target: Path
) -> None:
    path = saved_int8(tmp_path, target) / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ModelUnavailable, match=reason) as refused:
        load_network(path.parent, target_rows(target))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stored", ["float", "int8"])
def test_a_drafter_computed_in_int8_drafts_what_it_does_in_floats(
    stored: str, temperature: float, tmp_path: Path, target: Path
) -> None:
    saved_int8(tmp_path, target, anchor_input=True, anchor_input_rank=12)
    sampling = SamplingParams(max_tokens=80, temperature=temperature, seed=3, ignore_eos=True)
    pair = [make_dspark(tmp_path / stored, target), make_dspark(tmp_path / stored, target, int8=True, num_blocks=128)]
    names = [f"r{i}" for i in range(24)]
    rng = np.random.default_rng(0)
    for name in names:
        token_ids = rng.integers(0, 256, 30).tolist()
        for drafter in pair:
            drafter.open(name, token_ids, 30, sampling)
    drafts = [drafter.propose([Demand(name, 6) for name in names]) for drafter in pair]
    firsts = [(a.token_ids[0] == b.token_ids[0], a.confidences[0] - b.confidences[0]) for a, b in zip(*drafts, strict=True)]
    assert sum(same for same, _ in firsts) >= 21
    assert max(abs(difference) for _, difference in firsts) < 0.1
    assert all(len(draft.token_ids) == 6 for draft in drafts[1])


def test_layers_are_stored_and_computed_in_int8(tmp_path: Path, target: Path) -> None:
    known = range(0, 250, 2)
    results = []
    for kind, dtype in (("fp32", "float32"), ("int8", "float32"), ("fp32", "int8"), ("int8", "int8")):
        folder = write_tiny_layers(tmp_path / kind, target, known, weights=kind)
        model, output_ids = load_layers(folder, target, dtype, "cpu")
        assert output_ids is not None
        assert output_ids.tolist() == list(known)
        table = np.arange(2, dtype=np.int32)
        hidden = model.forward([PackedSpan(0, list(range(5, 45)), table)], model.new_cache(2))
        results.append(model.logits(hidden).float())
    for other in results[1:]:
        assert float((other - results[0]).norm() / results[0].norm()) < 0.1
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("fp32", "int8")]
    assert sizes[1] < 0.4 * sizes[0]


@needs_compiler
@pytest.mark.parametrize("token_ids", [range(300), [3, 64, 65, 127, 128, 700, 701, 49000], range(0, 9000, 7)], ids=str)
@pytest.mark.parametrize("sharpness", [0.1, 3.0])
def test_the_race_has_the_winner_that_the_definition_says(token_ids: range | list[int], sharpness: float) -> None:
    rng = np.random.default_rng(5)
    ids = np.array(token_ids)
    logits = torch.from_numpy(rng.normal(size=(12, len(ids))).astype(np.float32)) * sharpness
    seeds, positions = rng.integers(0, 2**63, 12).astype(np.uint64), rng.integers(0, 3000, 12)
    temperatures = np.array([0.0, 0.3, 1.0, 2.0] * 3, np.float32)
    margins = np.empty(12, np.float32)
    won = CpuGumbelArgmax(build.load_library(torch.float32), torch.float32, ids)(
        logits, noise_keys(seeds, positions), temperatures, None, margins
    )[0]
    for row, token_id in enumerate(won):
        z = logits[row].double().numpy()
        if temperatures[row]:
            noise = gumbel_of_few(int(seeds[row]), int(positions[row]), ids.tolist())
            z = z / float(temperatures[row]) + np.array(noise)
        assert token_id == ids[z.argmax()]
        first, second = np.sort(z)[:-3:-1]
        assert margins[row] == pytest.approx(first - second, abs=1e-4)


@needs_compiler
def test_of_equal_logits_the_first_token_wins() -> None:
    race = CpuGumbelArgmax(build.load_library(torch.float32), torch.float32, np.arange(10, 200))
    logits = torch.zeros(2, 190)
    logits[1, [150, 70, 71]] = 1.0
    assert race(logits, np.zeros(2, np.int64), np.zeros(2, np.float32))[0].tolist() == [10, 80]
