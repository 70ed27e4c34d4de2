"""What vLLM's engine is told, without vLLM."""

import os
from itertools import pairwise
from unittest import mock

import pytest

from cluster.config import Config, TargetConfig
from cluster.errors import InvalidField
from engine.vllm import arguments, environment
from engine.vllm.arguments import check_names
from engine.vllm.environment import BINDING, NOT_BOUND, binding_of, threads_of_ranks
from tests.support.vllm_engine import vllm_arguments


def test_unknown_arguments_are_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "argument_switches", lambda: {"quantization": False, "trust_remote_code": True})
    check_names({"quantization": "awq", "trust_remote_code": True})
    with pytest.raises(InvalidField, match=r"target\.vllm\.quantisation: .*did you mean quantization\?"):
        check_names({"quantisation": "awq"})
    monkeypatch.setattr(arguments, "argument_switches", dict)  # without vLLM
    check_names({"quantisation": "awq"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scheduler_cls", "scheduler_cls cannot be set here: the round schedules"),
        ("enable_chunked_prefill", "enable_chunked_prefill cannot be set here: the round plans each pass"),
        ("speculative_config", "speculative_config cannot be set here: set drafters instead"),
        ("tensor_parallel_size", "set target.tensor_parallel instead"),
        ("gpu_memory_utilization", "set target.gpu_memory_utilization instead"),
    ],
)
def test_arguments_that_are_not_the_users_are_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TargetConfig.model_validate({"engine": "vllm", "vllm": {name: 1}})


def test_the_native_engine_takes_no_arguments_of_vllm() -> None:
    with pytest.raises(ValueError, match="must be empty unless engine is vllm"):
        TargetConfig.model_validate({"vllm": {"quantization": "awq"}})
    with pytest.raises(ValueError, match="on the native engine, got 'float16'"):
        TargetConfig.model_validate({"dtype": "float16"})


def test_only_a_cpu_computes_eagerly() -> None:
    """Graphs are captured on GPUs."""
    assert vllm_arguments("cpu")["enforce_eager"] is True
    assert vllm_arguments("cuda")["enforce_eager"] is False
    assert vllm_arguments("cuda", enforce_eager=True)["enforce_eager"] is True


def test_graphs_are_captured_of_the_passes_that_are_planned() -> None:
    """vLLM would add the multiples of the longest span. What the user asks for of them holds, and the rest is ours."""
    assert "compilation_config" not in vllm_arguments("cpu")
    ours = vllm_arguments("cuda")["compilation_config"]
    sizes = ours["cudagraph_capture_sizes"]
    assert ours["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert (sizes[0], sizes[-1]) == (1, 512)
    assert all((longer - shorter - 1) / (shorter + 1) < 0.25 for shorter, longer in pairwise(sizes) if shorter >= 64)
    few = vllm_arguments("cuda", {"max_num_sequences": 2, "max_pass_tokens": 16})
    assert few["compilation_config"]["cudagraph_capture_sizes"][-1] == 32, "of 34 rows"

    def asked(**compilation: object) -> object:
        return vllm_arguments("cuda", compilation_config=compilation)["compilation_config"]

    assert asked(cudagraph_mode="PIECEWISE") == {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": sizes}
    assert asked(max_cudagraph_capture_size=64) == {"cudagraph_mode": "FULL_AND_PIECEWISE", "max_cudagraph_capture_size": 64}
    assert vllm_arguments("cuda", compilation_config=3)["compilation_config"] == 3


def test_a_target_starts_on_a_gpu_that_drafters_use() -> None:
    """vLLM wants the share free that `gpu_memory_utilization` names, 0.92 by default, though the cache's size is given."""
    on_gpu = vllm_arguments("cuda")
    assert on_gpu["kv_cache_memory_bytes"] == 2**30
    assert on_gpu["gpu_memory_utilization"] <= 0.02
    unsized = vllm_arguments("cuda", {"kv_cache_gb": "auto", "gpu_memory_utilization": 0.6})
    assert unsized["gpu_memory_utilization"] == 0.6, "its profile finds the cache's size"


@pytest.mark.parametrize(
    ("target", "has_cuda", "has_vllm", "has_gpu", "expected"),
    [
        ({}, True, True, True, "vllm"),
        ({"device": "cuda"}, True, True, False, "vllm"),  # on another machine of the cluster
        ({}, True, True, False, "native"),
        ({}, True, False, True, "native"),
        ({}, False, True, True, "native"),  # vLLM's build for CPUs
        ({"device": "cpu"}, True, True, True, "native"),
        ({"block_len": 16}, True, True, True, "native"),
        ({"dtype": "as-shipped"}, True, True, True, "native"),
        ({"engine": "native"}, True, True, True, "native"),
    ],
)
def test_the_engine_is_vllm_on_a_gpu_where_it_is_installed(
    target: dict[str, object], has_cuda: bool, has_vllm: bool, has_gpu: bool, expected: str
) -> None:
    missing = None if has_vllm else InvalidField("target.engine", "vllm", "is not installed")
    config = Config(target=TargetConfig.model_validate(target))
    with (
        mock.patch.object(environment, "torch_has_cuda", return_value=has_cuda),
        mock.patch.object(environment, "require_vllm", side_effect=missing),
        mock.patch("torch.cuda.is_available", return_value=has_gpu),
    ):
        assert environment.chosen_engine(config).target.engine == expected


def test_whether_torch_is_built_for_cuda_is_known_without_importing_it() -> None:
    import torch

    assert environment.torch_has_cuda() == (torch.version.cuda is not None)


def test_further_arguments_are_passed_on() -> None:
    passed = vllm_arguments("cpu", quantization="compressed-tensors")
    assert passed["quantization"] == "compressed-tensors"
    assert passed["max_num_batched_tokens"] == 64 * 17  # a pass in which every sequence has all its drafts


# ---- the variables that are set before vLLM is imported


def test_what_the_engine_depends_on_is_set_and_the_rest_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "require_vllm", lambda: None)
    users = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    monkeypatch.setattr(os, "environ", users.copy())
    environment.prepare_environment()
    assert {name: os.environ[name] for name in users} == users | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


# ---- how the cores of a machine are split over vLLM's ranks


@pytest.mark.parametrize(
    ("cores", "num_ranks", "num_threads", "expected"),
    [
        ({0: 0, 1: 1}, 2, 1, "0|1"),
        ({0: 0, 1: 1, 2: 2, 3: 3}, 2, 2, "0,1|2,3"),
        ({0: 0, 1: 0, 2: 1, 3: 1}, 2, 1, "0|2"),  # two CPUs of each core
        ({4: 2, 6: 3}, 2, 1, "4|6"),
        ({0: 0, 1: 1}, 2, 2, NOT_BOUND),
        ({0: 0, 1: 0}, 2, 1, NOT_BOUND),
    ],
)
def test_ranks_get_cores_of_their_own(cores: dict[int, int], num_ranks: int, num_threads: int, expected: str) -> None:
    assert binding_of(cores, num_ranks, num_threads) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, "0|1"), ("auto", "0|1"), ("2|3", "2|3")])
def test_a_binding_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str) -> None:
    monkeypatch.delenv(BINDING, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    if asked is not None:
        monkeypatch.setenv(BINDING, asked)
    with threads_of_ranks("0|1", 1):
        assert (os.environ[BINDING], os.environ["OMP_NUM_THREADS"]) == (expected, "1")
    assert (os.environ.get(BINDING), os.environ["OMP_NUM_THREADS"]) == (asked, "7")
