"""How the kernels are built, what happens where they cannot be, and each of them against the reference."""

import ctypes
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import compiling
from engine.batch_layout import Layout, PackedSpan, lay_out
from engine.cpu import build
from engine.cpu.native_product import Bf16Linear
from engine.cpu.ops import AttentionShape, CpuOps
from engine.cpu.packed import packed_linear
from engine.cpu_level import AMX, AVX512_BF16, cpu_level, machine_level
from engine.factory import make_ops
from engine.forward import DecoderLayer
from engine.models.config import DecoderConfig, inverse_frequencies, parse_config
from engine.models.weights import LinearWeight
from engine.ops import HeadNorms, LayerParts, TorchOps
from tests.support.compiler import needs_compiler

CPU = torch.device("cpu")


def config_of(head_dim: int) -> DecoderConfig:
    return parse_config(
        {
            "model_type": "qwen3",
            "vocab_size": 100,
            "hidden_size": 100,
            "intermediate_size": 150,
            "num_hidden_layers": 1,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "max_position_embeddings": 4096,
        }
    )


CONFIG = config_of(48)
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def ops(dtype: torch.dtype) -> tuple[CpuOps, TorchOps]:
    return CpuOps(CONFIG, dtype), TorchOps(CONFIG, dtype)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 40, 400])
def test_add_norm(rows: int, ops: tuple[CpuOps, TorchOps], dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    residual, delta, weight = torch.randn(rows, 100), torch.randn(rows, 100).to(dtype), torch.randn(100)
    residuals = residual.clone(), residual.clone()
    ours, expected = (op.add_norm(at, delta, weight) for op, at in zip(ops, residuals, strict=True))
    torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(residuals[0], residuals[1])
    torch.testing.assert_close(
        ops[0].add_norm(residual, None, weight), ops[1].add_norm(residual, None, weight), **TOLERANCE[dtype]
    )


@needs_compiler
@pytest.mark.parametrize("rows", [1, 40, 400])
def test_gate(rows: int, ops: tuple[CpuOps, TorchOps], dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    gate_up = (torch.randn(rows, 300) * 6).to(dtype)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])  # beyond the range of a float's exponential
    torch.testing.assert_close(ops[0].gate(gate_up), ops[1].gate(gate_up), **TOLERANCE[dtype])


@needs_compiler
@pytest.mark.parametrize("head_dim", [48, 64, 96])  # 64 and 96 by AMX where it is, in blocks of 32 and 64
@pytest.mark.parametrize("block_len", [16, 32, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_attention(head_dim: int, block_len: int, normed: bool, dtype: torch.dtype) -> None:
    """Spans of 1, 9 and 70 rows on contexts of 700, 0 and 515 tokens, over a cache that was written at random before."""
    torch.manual_seed(block_len)
    config = config_of(head_dim)
    layout, num_blocks = spans_of(config, block_len, ((700, 1), (0, 9), (515, 70)))
    keys = torch.randn(num_blocks, 2, head_dim, block_len).to(dtype)
    values = torch.randn(num_blocks, 2, block_len, head_dim).to(dtype)
    norms = HeadNorms(torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if normed else None
    qkv = torch.randn(layout.num_rows, 14 * head_dim).to(dtype)
    results = []
    for op in (CpuOps(config, dtype), TorchOps(config, dtype)):
        own_keys, own_values = keys.clone(), values.clone()
        queries = op.rotate_and_store(qkv, norms, layout, own_keys, own_values)
        results.append((queries, own_keys, own_values, op.attention(queries, layout, own_keys, own_values)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])
    assert not torch.equal(results[0][1], keys)


def spans_of(config: DecoderConfig, block_len: int, lens: Sequence[tuple[int, int]]) -> tuple[Layout, int]:
    """Spans of (context, rows) whose blocks are scattered, and how many blocks these are."""
    num_blocks = [-(-sum(each) // block_len) for each in lens]
    order = np.random.default_rng(block_len).permutation(sum(num_blocks)).astype(np.int32)
    blocks = np.split(order, np.cumsum(num_blocks)[:-1])
    spans = [PackedSpan(base, [0] * num, table) for (base, num), table in zip(lens, blocks, strict=True)]
    return lay_out(spans, block_len, torch.tensor(inverse_frequencies(config)), CPU), sum(num_blocks)


@needs_compiler
@pytest.mark.parametrize("base", [0, 30, 511])
@pytest.mark.parametrize("block_len", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [48, 64, 96])
def test_attention_of_a_row_does_not_depend_on_the_rows_beside_it(
    head_dim: int, block_len: int, base: int, dtype: torch.dtype
) -> None:
    """Bit by bit, in spans of 1 to 40 rows: a token is the same whether it is verified or decoded."""
    torch.manual_seed(base)
    config = config_of(head_dim)
    ops = CpuOps(config, dtype)
    _, num_blocks = spans_of(config, block_len, ((base, 40),))
    keys = torch.randn(num_blocks, 2, head_dim, block_len).to(dtype)
    values = torch.randn(num_blocks, 2, block_len, head_dim).to(dtype)
    queries = torch.randn(40, 10, head_dim)

    def attend(first: int, num: int) -> torch.Tensor:
        table = np.random.default_rng(block_len).permutation(num_blocks).astype(np.int32)
        frequencies = torch.tensor(inverse_frequencies(config))
        layout = lay_out([PackedSpan(base + first, [0] * num, table)], block_len, frequencies, CPU)
        return ops.attention(queries[first : first + num].contiguous(), layout, keys, values)

    whole = attend(0, 40)
    for first, num in ((0, 1), (7, 1), (39, 1), (3, 5), (2, 6), (1, 16), (0, 17)):
        assert torch.equal(attend(first, num), whole[first : first + num]), (first, num)


@needs_compiler
@pytest.mark.parametrize("base", [38, 39, 40, 520])
@pytest.mark.parametrize("block_len", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [48, 64, 96])
def test_what_an_earlier_owner_of_a_block_left_is_not_seen(
    head_dim: int, block_len: int, base: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(base)
    config = config_of(head_dim)
    layout, num_blocks = spans_of(config, block_len, ((base, 3),))
    keys = torch.randn(num_blocks, 2, head_dim, block_len).to(dtype)
    values = torch.randn(num_blocks, 2, block_len, head_dim).to(dtype)
    queries = torch.randn(3, 10, head_dim)
    ops = CpuOps(config, dtype)
    clean = ops.attention(queries, layout, keys, values)
    last, num_own = int(layout.tables[0, (base + 2) // block_len]), (base + 2) % block_len + 1
    assert num_own < block_len
    keys[last, :, :, num_own:] = torch.nan
    values[last, :, num_own:] = torch.nan
    assert torch.equal(ops.attention(queries, layout, keys, values), clean)


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("block_len", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [48, 64, 96])
def test_who_looks_for_one_key_gets_its_value(head_dim: int, block_len: int, num_rows: int, dtype: torch.dtype) -> None:
    """Among 700, wherever it lies."""
    torch.manual_seed(block_len)
    config = config_of(head_dim)
    layout, num_blocks = spans_of(config, block_len, ((700 - num_rows, num_rows),))
    keys = torch.randn(num_blocks, 2, head_dim, block_len).to(dtype)
    values = torch.randn(num_blocks, 2, block_len, head_dim).to(dtype)
    ops = CpuOps(config, dtype)
    for position in (0, 1, 15, 16, 31, 32, 63, 64, 511, 512, 513, 543, 544, 690, 691):
        block, place = int(layout.tables[0, position // block_len]), position % block_len
        wanted = keys[block, :, :, place].float() * 8  # scores are 8 |key|^2 there, and far below elsewhere
        found = ops.attention(wanted.repeat_interleave(5, 0).repeat(num_rows, 1, 1), layout, keys, values)
        expected = values[block, :, place].repeat_interleave(5, 0).reshape(1, -1).expand(num_rows, -1)
        torch.testing.assert_close(found.reshape(num_rows, -1), expected, **TOLERANCE[dtype], msg=f"at {position}")


class OneByOne(CpuOps):
    def whole_layer(self, parts: LayerParts) -> None:
        return None


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("normed", "biased"), [(False, True), (True, False)])
def test_a_layer_by_one_call_is_the_same_to_the_last_bit(normed: bool, biased: bool, int8: bool, dtype: torch.dtype) -> None:
    """With and without something to add first, its attention by another layout than its rows, as of DSpark."""
    torch.manual_seed(3)
    config = config_of(48)
    layout, num_blocks = spans_of(config, 16, ((30, 4), (0, 4)))
    ends = layout.base_lens.repeat_interleave(4) + 3
    starts, tables = torch.arange(9, dtype=torch.int32), layout.tables.repeat_interleave(4, dim=0)
    each_at_the_end = replace(layout, starts=starts, base_lens=ends, tables=tables, max_span_len=1)
    norms = HeadNorms(torch.rand(48) + 0.5, torch.rand(48) + 0.5) if normed else None

    def weight(num_out: int, num_in: int) -> LinearWeight:
        bias = torch.randn(num_out).to(dtype) if biased else None
        return LinearWeight((torch.randn(num_out, num_in) / num_in**0.5).to(dtype), bias)

    weights = [weight(*sizes) for sizes in ((14 * 48, 100), (100, 480), (300, 100), (100, 150))]
    norm_weights = torch.rand(100) + 0.5, torch.rand(100) + 0.5
    residual, delta = torch.randn(8, 100), torch.randn(8, 100).to(dtype)
    cache = torch.randn(num_blocks, 2, 48, 16).to(dtype), torch.randn(num_blocks, 2, 16, 48).to(dtype)
    results = []
    for ops in (CpuOps(config, dtype, int8=int8), OneByOne(config, dtype, int8=int8)):
        qkv, out, gate_up, down = (ops.linear(each) for each in weights)
        parts = LayerParts(norm_weights[0], qkv, norms, out, norm_weights[1], gate_up, down)
        assert (ops.whole_layer(parts) is not None) == (type(ops) is CpuOps and (int8 or dtype == torch.bfloat16))
        layer = DecoderLayer(ops, parts)
        for added, attends in ((None, layout), (delta, each_at_the_end)):
            own, kv = residual.clone(), (cache[0].clone(), cache[1].clone())
            results.append((layer.run(layout, own, added, kv, attends), own, *kv))
    for ours, expected in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert not torch.equal(results[0][0], results[1][0])


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_a_layer_by_one_call_is_the_same_on_threads(int8: bool) -> None:
    """Large enough that every operator uses both threads, and takes more than one chunk of rows."""
    torch.manual_seed(4)
    config = config_of(64)
    layout, num_blocks = spans_of(config, 32, ((300, 36), (300, 300)))
    weights = [
        LinearWeight((torch.randn(num_out, num_in) / num_in**0.5).bfloat16())
        for num_out, num_in in ((14 * 64, 512), (512, 640), (1536, 512), (512, 768))
    ]
    norms = torch.rand(512) + 0.5, torch.rand(512) + 0.5
    residual, delta = torch.randn(336, 512), torch.randn(336, 512).bfloat16()
    cache = torch.randn(num_blocks, 2, 64, 32).bfloat16(), torch.randn(num_blocks, 2, 32, 64).bfloat16()
    results = []
    with computing_threads(2):
        for ops in (CpuOps(config, torch.bfloat16, int8=int8), OneByOne(config, torch.bfloat16, int8=int8)):
            qkv, out, gate_up, down = (ops.linear(each) for each in weights)
            parts = LayerParts(norms[0], qkv, None, out, norms[1], gate_up, down)
            assert (ops.whole_layer(parts) is not None) == (type(ops) is CpuOps)
            layer = DecoderLayer(ops, parts)
            own, kv = residual.clone(), (cache[0].clone(), cache[1].clone())
            results.append((layer.run(layout, own, delta, kv, layout), own, *kv))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
def test_layers_of_many_rows_keep_their_memory() -> None:
    """Memory that is freed and taken again costs a page fault for every 4 KiB, 6,000 here at each call."""
    config, num_rows = config_of(64), 2048
    layout, num_blocks = spans_of(config, 32, ((0, 32),) * (num_rows // 32))
    ops = CpuOps(config, torch.bfloat16)
    sizes = (14 * 64, 64), (64, 640), (6144, 64), (64, 3072)
    qkv, out, gate_up, down = (ops.linear(LinearWeight(torch.randn(*size).bfloat16())) for size in sizes)
    layer = DecoderLayer(ops, LayerParts(torch.ones(64), qkv, None, out, torch.ones(64), gate_up, down))
    residual, cache = torch.randn(num_rows, 64), torch.zeros(2, num_blocks, 2, 64, 32).bfloat16()
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        layer.run(layout, residual, None, (cache[0], cache[1].view(num_blocks, 2, 32, 64)), layout)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


@contextmanager
def computing_threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_layer_with_a_product_of_another_kind_is_called_one_by_one() -> None:
    """As of a rank, whose products are summed over the ranks: one call would leave the sum out."""
    ops = CpuOps(CONFIG, torch.bfloat16)
    qkv, out, gate_up, down = (
        ops.linear(LinearWeight(torch.randn(num_out, num_in).bfloat16()))
        for num_out, num_in in ((14 * 48, 96), (96, 480), (320, 96), (96, 160))
    )
    parts = LayerParts(torch.ones(96), qkv, None, out, torch.ones(96), gate_up, down)
    assert ops.whole_layer(parts) is not None
    assert ops.whole_layer(replace(parts, out=lambda x: out(x))) is None
    assert ops.whole_layer(replace(parts, down=lambda x: down(x))) is None


@needs_compiler
def test_numbers_that_are_none_stay_none(ops: tuple[CpuOps, TorchOps], dtype: torch.dtype) -> None:
    """A broken row must be seen by the sampler, not hidden by a kernel."""
    gate_up = torch.ones(2, 300).to(dtype)
    gate_up[1, 5] = torch.nan
    assert ops[0].gate(gate_up)[1, 5].isnan()
    assert ops[0].add_norm(torch.full((1, 100), torch.nan), None, torch.ones(100)).isnan().all()


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products(rows: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(37, 100).to(dtype), torch.randn(37).to(dtype), torch.randn(rows, 100).to(dtype)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    ours = packed_linear(LinearWeight(weight, bias if biased else None))(x)
    torch.testing.assert_close(
        ours.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=5e-2 if dtype == torch.bfloat16 else 1e-4
    )


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(("num_out", "num_in"), [(37, 100), (37, 96), (48, 64), (64, 576), (48, 101)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_a_row_do_not_depend_on_the_others(
    ops: tuple[CpuOps, TorchOps], rows: int, num_out: int, num_in: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(num_out, num_in).to(dtype), torch.randn(rows, num_in).to(dtype)
    bias = torch.randn(num_out).to(dtype) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    linear = ops[0].linear(LinearWeight(weight, bias))
    ours = linear(x)
    low = dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=1e-2 if low else 1e-5, atol=5e-2 if low else 1e-4)
    if isinstance(linear, Bf16Linear):
        assert all(torch.equal(linear(x[i : i + 1]), ours[i : i + 1]) for i in range(rows))
        broken = x.clone()
        broken[-1, 3] = torch.nan
        assert linear(broken)[-1].isnan().all()
        assert torch.equal(linear(broken)[:-1], ours[:-1])


@needs_compiler
@pytest.mark.parametrize("pairs", [0, 1])
def test_both_ways_to_multiply_with_avx512_bf16(pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is used depends on whose CPU it is; each must be right on any."""
    if not cpu_level().includes(AVX512_BF16):
        pytest.skip("no AVX-512 BF16")
    ways = (f"-DPAIRS_ARE_FASTER={pairs}", "-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
    monkeypatch.setattr(compiling, "_FLAGS", (*compiling._FLAGS, *ways))
    monkeypatch.setattr(build, "SOURCES", [path for path in build.SOURCES if path.name in ("bf16.c", "tiles.c")])
    torch.manual_seed(pairs)
    weight, x = torch.randn(70, 98).to(torch.bfloat16), torch.randn(40, 98).to(torch.bfloat16)
    linear = Bf16Linear(build.load_library(torch.bfloat16, tmp_path), LinearWeight(weight, None))
    exact, alone = x.double() @ weight.double().T, torch.cat([linear(x[row : row + 1]) for row in range(40)])
    torch.testing.assert_close(alone.double(), exact, rtol=1e-2, atol=5e-2)
    assert all(torch.equal(linear(x[:num]), alone[:num]) for num in range(1, 41))


@needs_compiler
def test_amx_is_used_where_the_level_has_it(ops: tuple[CpuOps, TorchOps], dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16 or machine_level() != AMX:
        pytest.skip("no AMX, or not for this type")
    library = build.load_library(dtype)
    assert bool(library.has_tiles()) == cpu_level().includes(AMX)
    if not library.has_tiles():
        return
    for head_dim, block_len, attends in ((64, 32, 1), (96, 64, 1), (48, 32, 0), (64, 16, 0)):
        assert library.attends_by_tiles(ctypes.byref(AttentionShape(10, 2, head_dim, block_len))) == attends, (
            head_dim,
            block_len,
        )


@needs_compiler
@pytest.mark.parametrize("size", [8, 48])
def test_blocks_that_the_kernels_cannot_read_are_refused(
    size: int, ops: tuple[CpuOps, TorchOps], dtype: torch.dtype
) -> None:
    layout = lay_out([PackedSpan(0, [0], np.zeros(1, np.int32))], size, torch.tensor(inverse_frequencies(CONFIG)), CPU)
    keys, values = torch.zeros(1, 2, 48, size).to(dtype), torch.zeros(1, 2, size, 48).to(dtype)
    with pytest.raises(ValueError, match=f"multiple of 16 that divides 512 on a CPU, got {size}"):
        ops[0].rotate_and_store(torch.zeros(1, 14 * 48).to(dtype), None, layout, keys, values)


@needs_compiler
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load_library(torch.float32, tmp_path)
    (library,) = tmp_path.iterdir()
    monkeypatch.setattr(compiling.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    build.load_library(torch.float32, tmp_path)
    assert [library] == list(tmp_path.iterdir())


@needs_compiler
def test_threads_are_torchs_own(tmp_path: Path) -> None:
    """One OpenMP runtime in the process, whoever was loaded first."""
    code = (
        "import torch, pathlib, sys; from engine.cpu.build import load_library; torch.ones(9, 9) @ torch.ones(9, 9);"
        "load_library(torch.float32, pathlib.Path(sys.argv[1]));"
        "maps = open('/proc/self/maps').read().splitlines();"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line or 'libiomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_plain_torch_does_it_and_the_log_says_so(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    if compiler == "no-such-compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_ops(CONFIG, torch.float32, CPU), TorchOps)
    told = [
        record.getMessage() for record in caplog.records if record.name == "engine.factory"
    ]  # another logger warns where there is AMX
    assert len(told) == 1
    assert "several times slower" in told[0]
    assert not list(tmp_path.rglob("*.so*"))


@pytest.mark.parametrize("error", [OSError("read-only"), RuntimeError("Could not determine home directory.")])
def test_without_a_folder_to_keep_them_plain_torch_does_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> Path:
        raise error

    monkeypatch.setattr(compiling, "cache_folder", nowhere)
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_ops(CONFIG, torch.float32, CPU), TorchOps)
    assert str(error) in caplog.text


def test_shapes_without_kernels_go_to_plain_torch() -> None:
    small: DecoderConfig = parse_config(
        {
            "model_type": "llama",
            "vocab_size": 9,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        }
    )
    assert not CpuOps.supports(small, torch.float32)
    assert isinstance(make_ops(small, torch.float32, CPU), TorchOps)
    with pytest.raises(ValueError, match="head dimension of 8"):
        CpuOps(small, torch.float32)
