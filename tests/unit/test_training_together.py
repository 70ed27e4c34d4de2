"""Training in several processes, and writing limits by GPU memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.shipped import kind_of
from tests.support.word_model import write_wordy_model
from training.feature_cache import delete_partial_files
from training.frozen import writing_limits

pytestmark = pytest.mark.slow

# One of the processes that torchrun starts. It tells how its own part of the training came out.
ONE = """
import hashlib, sys
from pathlib import Path
import torch
from training import distil
from training.distributed import join_world
from training.pipeline import train
from tests.unit.test_train import Silent, options

class Told(distil.Distillation):
    def run(self, tell):
        super().run(tell)
        values = torch.cat([p.detach().flatten() for p in self._parameters.values()])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        Path(sys.argv[2], f"told-{world.rank}").write_text(f"{digest} {self.progress.step} {self.num_steps}")

from training import pipeline
pipeline.Distillation = Told
asked = options(Path(sys.argv[1]), Path(sys.argv[2]), num_prompts=60, num_tokens=2400, num_epochs=2)
with join_world("cpu") as world:
    result = train(asked, world, Silent())
    assert (result is not None) == world.is_first
"""


@pytest.mark.nightly
def test_two_processes_write_read_and_train_together(tmp_path: Path) -> None:
    """Each writes its share, both read all answers, and both end with the same weights."""
    model, folder = write_wordy_model(tmp_path / "model"), tmp_path / "run"
    folder.mkdir()
    script = tmp_path / "one.py"
    script.write_text(ONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, str(model), str(folder)], capture_output=True, text=True, timeout=500, env=environment)
    assert ran.returncode == 0, ran.stderr[:3000]
    assert kind_of(folder / "dspark") == "dspark"
    for kind in ("prompts", "answers"):
        assert all((folder / "work" / f"{kind}-{rank}.jsonl").stat().st_size for rank in range(2))
    first, second = ((folder / f"told-{rank}").read_text() for rank in range(2))
    assert first == second
    _, step, num_steps = first.split()
    assert step == num_steps
    kept = sorted((folder / "work" / "readings").iterdir())
    num_answers = sum(len((folder / "work" / f"answers-{rank}.jsonl").read_text().splitlines()) for rank in range(2))
    assert 2 < len(kept) <= num_answers
    assert {path.suffix for path in kept} == {".safetensors"}


def test_partial_files_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.1f.partial").write_text("half")
    (tmp_path / "b.safetensors").write_text("whole")
    delete_partial_files(tmp_path)
    delete_partial_files(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]


@pytest.mark.parametrize("free_gb", [2, 6, 16, 40, 100])
def test_writing_limits_follow_the_free_memory(free_gb: int) -> None:
    limits = writing_limits(free_gb * 2**30)
    assert limits.kv_cache_gb <= min(24.0, free_gb / 2)
    assert 16 <= limits.max_in_flight <= 1024
    assert 512 <= limits.max_pass_tokens <= 8192


def test_a_large_gpu_writes_more_at_once_than_a_small_one() -> None:
    small, large = writing_limits(8 * 2**30), writing_limits(80 * 2**30)
    assert small.max_in_flight < large.max_in_flight == 1024
    assert small.kv_cache_gb < large.kv_cache_gb == 24.0
