"""The comparison of vLLM's releases finds what was changed, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from tests.vllm.interface import Release, missing, vllm_folder

pytestmark = pytest.mark.vllm

CHANGES = [  # file, what stands there, what comes instead, what is found
    ("envs.py", "VLLM_USE_V2_MODEL_RUNNER:", "VLLM_MODEL_RUNNER:", "vllm.envs.VLLM_USE_V2_MODEL_RUNNER is gone"),
    (
        "v1/core/sched/output.py",
        "class SchedulerOutput",
        "class Planned",
        "vllm.v1.core.sched.output.SchedulerOutput is gone",
    ),
    (
        "v1/core/sched/scheduler.py",
        "def update_draft_token_ids(self, ",
        "def update_draft_token_ids(self, step, ",
        "takes step",
    ),
    ("v1/worker/gpu/states.py", "self.draft_tokens = ", "self.drafts = ", "gpu.states.RequestState.draft_tokens is gone"),
    ("v1/worker/gpu/model_runner.py", "def sample(\n        self,", "def sample(\n        self, mode,", "takes mode"),
    ("v1/worker/gpu_model_runner.py", "def _sample(", "def _choose(", "Runner._sample is gone"),
    (
        "engine/arg_utils.py",
        "    enable_prefix_caching: ",
        "    prefix_caching: ",
        "EngineArgs has no enable_prefix_caching",
    ),
]


def test_each_change_of_the_interface_is_found(tmp_path: Path) -> None:
    supported = vllm_folder()
    shutil.copytree(
        supported, tmp_path / "vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    release = Release(supported.parent)
    assert missing(release, Release(tmp_path)) == []
    for name, old, new, _ in CHANGES:
        text = (supported / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        (tmp_path / "vllm" / name).unlink()
        (tmp_path / "vllm" / name).write_text(text.replace(old, new, 1))
    found = missing(release, Release(tmp_path))
    by_change = {words: [line for line in found if words in line] for *_, words in CHANGES}
    assert all(by_change.values()), by_change
    assert sorted(line for lines in by_change.values() for line in lines) == found
