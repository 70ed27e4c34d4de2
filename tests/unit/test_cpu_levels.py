"""What holds at the machine's own CPU level holds at every lower one: each runs in a process of its own, since torch reads
its limits once."""

import subprocess
import sys

import pytest

from tests.support.compiler import needs_compiler
from tests.support.cpu_levels import LOWER_LEVELS, ROOT, environment_of

pytestmark = [needs_compiler, pytest.mark.slow]

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


@pytest.mark.parametrize("level", LOWER_LEVELS)
def test_kernels_compute_what_torch_does(level: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", ELSEWHERE, *PARITY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment_of(level), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


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
