"""CPU levels: which there are, which the machine has, and what each means to compilers, torch, kernels and answers."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.errors import InvalidField
from engine import compiling, cpu_setup
from engine import cpu_level as levels
from engine.compiling import NoCompiler, load_compiled
from engine.cpu_level import CpuLevel, cpu_level, level_of, machine_level, possible_levels
from tests.support.compiler import needs_compiler
from tests.support.cpu_levels import LOWER_LEVELS, ROOT, environment_of, pretend

OWN = machine_level()
LOWER = possible_levels(OWN)[:-1]
AVX2 = {"sse2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("architecture", "features", "level"),
    [
        ("x86_64", {"sse2", "avx"}, "generic"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 - {"fma"}, "generic"),
        ("x86_64", AVX2 | {"avx512f"}, "avx2"),  # Knights Landing
        ("x86_64", AVX512, "avx512"),
        ("x86_64", BF16, "avx512_bf16"),
        ("x86_64", AVX512 | {"amx_tile", "amx_bf16"}, "avx512"),
        ("x86_64", BF16 | {"amx_tile"}, "avx512_bf16"),
        ("x86_64", AMX, "amx"),
        ("aarch64", set(), "neon"),
        ("arm64", set(), "neon"),
        ("riscv64", set(), "generic"),
    ],
)
def test_the_level_of_a_cpu(architecture: str, features: set[str], level: str) -> None:
    assert level_of(architecture, frozenset(features)) == level


def test_the_features_that_macos_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "FPU SSE3 FMA MOVBE AVX1.0 F16C\nBMI1 AVX2 BMI2 ERMS\n"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(levels.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, told))
    monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
    machine_level.cache_clear()
    try:
        assert machine_level() == "avx2"
    finally:
        machine_level.cache_clear()


@pytest.mark.parametrize("value", [None, "", "auto"])
def test_by_default_the_level_is_the_machines_own(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CPU", raising=False)
    if value is not None:
        monkeypatch.setenv("OUTRIDER_CPU", value)
    assert cpu_level() == CpuLevel(OWN, OWN)
    assert str(cpu_level()) == OWN


def test_the_variable_lowers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "avx512", "amx")
    assert str(cpu_level()) == "avx512, lowered from amx by OUTRIDER_CPU"
    assert [cpu_level().includes(level) for level in (*levels.X86_LEVELS, "neon")] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("avx3", r"OUTRIDER_CPU: is no CPU level: use auto or one of generic, avx2, got 'avx3'"),
        ("amx", r"OUTRIDER_CPU: is above this machine's own level, avx2: use auto or one of generic, avx2, got 'amx'"),
        ("neon", r"OUTRIDER_CPU: is above this machine's own level, avx2: use auto or one of generic, avx2, got 'neon'"),
    ],
)
def test_a_level_that_the_machine_lacks_is_refused(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, value, "avx2")
    with pytest.raises(InvalidField, match=message):
        cpu_level()


def test_which_levels_have_fast_products_in_bf16() -> None:
    fast = {level for level in levels.X86_LEVELS if CpuLevel(level, "amx").has_bf16_products}
    assert fast == {"avx512_bf16", "amx"}
    assert not CpuLevel("neon", "neon").has_bf16_products


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions of x86")
@pytest.mark.parametrize("name", possible_levels(OWN))
def test_a_library_uses_only_instructions_of_its_level(name: str, tmp_path: Path) -> None:
    """What the compiler says that it may use."""
    macros = {"avx2": "__AVX2__", "avx512": "__AVX512BW__", "avx512_bf16": "__AVX512BF16__", "amx": "__AMX_BF16__"}
    source = tmp_path / "levels.c"
    source.write_text(
        "".join(f"#ifdef {macro}\nint has_{at}(void) {{ return 1; }}\n#endif\n" for at, macro in macros.items())
        + "int runs(void) { return 1; }\n"
    )
    level = CpuLevel(name, OWN)
    library = load_compiled("levels", (source,), folder=tmp_path / "cache", level=level)
    assert library.runs() == 1
    assert {at for at in macros if hasattr(library, f"has_{at}")} == {at for at in macros if level.includes(at)}


@pytest.mark.slow
def test_importing_the_engine_sets_and_compiles_nothing(tmp_path: Path) -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "import engine, engine.factory, engine.loading, engine.cpu_setup, engine.cpu.ops\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    environment = environment_of("auto") | {"OUTRIDER_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "home").exists()


COMPUTE = """
import torch
from engine.cpu_setup import configure_cpu
configure_cpu()
x, w = torch.ones(16, 64), torch.ones(96, 64)
print(torch.backends.cpu.get_cpu_capability())
print(torch.nn.functional.linear(x.bfloat16(), w.bfloat16()).sum().item())
torch.ops.mkldnn._linear_pointwise.default(x, torch.ops.mkldnn._reorder_linear_weight(w, 32), None, "none", [], "")
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names that torch, oneDNN and MKL have for levels of x86")
@pytest.mark.parametrize("name", LOWER)
def test_torch_onednn_and_mkl_follow(name: str) -> None:
    """Each says so of itself, in a process of its own, where torch was imported before the call."""
    environment = environment_of(name) | {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert {"generic": "DEFAULT", "avx2": "AVX2"}.get(name, "AVX512") in done.stdout.splitlines()
    assert str(16 * 96 * 64.0) in done.stdout
    (told,) = [line for line in done.stdout.splitlines() if "info,cpu,isa:" in line]
    isa = {
        "generic": "Intel SSE4.1",
        "avx2": "Intel AVX2",
        "avx512": "Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions",
    }
    assert "AMX" not in told
    if name in isa:
        assert told.endswith(isa[name])
    kernels = [line for line in done.stdout.splitlines() if ",exec,cpu," in line]
    assert kernels
    if name in ("generic", "avx2"):
        assert not any("avx512" in line for line in kernels)
    if name == "generic":
        (said,) = [line for line in done.stdout.splitlines() if line.startswith("MKL_VERBOSE oneMKL")]
        assert "Advanced Vector Extensions" not in said


WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
AT_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@pytest.mark.parametrize(
    ("sizes", "level", "own", "expected"),
    [
        (1, "amx", {}, {}),
        (0, "amx", {}, WITHOUT_AMX),
        *((0, "amx", {variable: "AVX2"}, {variable: "AVX2"}) for variable in cpu_setup.ONEDNN_VARIABLES),
        ("not asked", "avx2", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, AT_AVX2),
        (NoCompiler("no C compiler found"), "amx", {}, WITHOUT_AMX),
    ],
    ids=str,
)
def test_onednn_leaves_amx_out_where_its_tiles_have_no_sizes_unless_the_user_limits_it(
    sizes: object,
    level: str,
    own: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lowered level overrides the user's limit. What is set is undone."""

    def load(*_: object) -> SimpleNamespace:
        if isinstance(sizes, NoCompiler):
            raise sizes
        assert isinstance(sizes, int), "asked"
        return SimpleNamespace(tells_tile_sizes=lambda: sizes)

    for variable in cpu_setup.VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    pretend(monkeypatch, level, "amx")
    monkeypatch.setattr(cpu_setup, "load_compiled", load)
    cpu_setup.configure_cpu()
    assert {name: os.environ[name] for name in cpu_setup.VARIABLES if name in os.environ} == expected
    assert ("no C compiler found" in caplog.text) == isinstance(sizes, NoCompiler)


@needs_compiler
def test_only_a_cpu_with_amx_tells_tile_sizes(tmp_path: Path) -> None:
    library = load_compiled("tile_sizes", (compiling.TILE_SIZES,), folder=tmp_path)
    if library.tells_tile_sizes():
        assert "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.mark.slow
def test_products_work_at_the_machines_own_level() -> None:
    """In a process of its own: where AMX is broken and not left out, it dies."""
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE], capture_output=True, text=True, timeout=120, env=environment_of("auto")
    )
    assert done.returncode == 0, done.stderr
    assert str(16 * 96 * 64.0) in done.stdout


# ---- what holds at the machine's own level holds at every lower one: in processes of their own, as torch reads limits once


# Kernels against plain torch, without the tests that compile into folders of their own.
PARITY = ("tests/unit/test_cpu_kernels.py", "tests/unit/test_int8.py", "tests/unit/test_forward.py")
ELSEWHERE = "not second_process and not torchs_own and not every_instruction_set"

# Two answers, drafted and by the plain target, by the whole cluster in one process.
EMBEDDED = """
import asyncio
from cluster.config import Config, DraftLengthConfig, PlannerConfig
from cluster.resolve import resolve
from cluster.types import Request, SamplingParams
from deploy.api.tokenizer import Tokenizer
from benchmarks.embedded import EmbeddedCluster
from profiler.hardware import here
from drafters.shipped import with_shipped
from engine.cpu_setup import configure_cpu
from engine.models.prepare import ensure_model

# The default rules stop drafting where a busy machine makes drafts too slow to pay.
length = DraftLengthConfig(kind="fixed", num_tokens=4)
planner = PlannerConfig(draft_length=length, verify="all", overlap="barrier", max_hold_ms=10_000)
print(configure_cpu())
tokenizer = Tokenizer.from_folder(ensure_model("smollm2-135m"))
prompt = asyncio.run(tokenizer.encode("The capital of France is", add_special_tokens=False, max_tokens=100))
with EmbeddedCluster.of(resolve(with_shipped(Config(planner=planner)), here())) as cluster:
    for chain in (None, ()):  # drafted, and by the target alone
        sampling = SamplingParams(max_tokens=24, temperature=0.0)
        (completion,) = cluster.complete([Request("r", prompt, sampling, arrival_s=0.0, chain=chain)])
        print(repr(tokenizer.decode(completion.token_ids)), completion.num_proposed > 0)
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", LOWER_LEVELS)
def test_kernels_compute_what_torch_does(level: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", ELSEWHERE, *PARITY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment_of(level), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


@needs_compiler
@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("model_folder")
@pytest.mark.parametrize("level", [level for level in LOWER_LEVELS if level != "avx2"])
def test_a_whole_cluster_answers_as_its_plain_target_does(level: str) -> None:
    """Not at AVX2: on machines of that level all tests run. tests/cluster/test_served_levels.py has the same over Ray."""
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED], capture_output=True, text=True, timeout=280, env=environment_of(level), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    named, drafted, plain = done.stdout.splitlines()
    assert named.startswith(f"{level}, lowered from ")
    assert "Paris" in drafted  # in bfloat16 a near-tie may fall the other way, so the texts may differ
    assert "Paris" in plain
    assert [drafted.rsplit(" ", 1)[1], plain.rsplit(" ", 1)[1]] == ["True", "False"]
