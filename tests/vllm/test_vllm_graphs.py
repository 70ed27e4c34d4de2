"""Which CUDA graph a batch of the round gets, by vLLM's own rules of dispatch, for each kind of attention backend."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.arguments import MAX_DRAFT_LEN
from engine.vllm.environment import prepare_environment
from tests.support.vllm_engine import vllm_arguments

pytestmark = pytest.mark.vllm

Batch = Sequence[int]  # rows of each request
Dispatch = Callable[[Batch], tuple[str, int]]  # kind of the graph and its rows

MAX_NUM_SEQUENCES = 64
LONGEST = 1 + MAX_DRAFT_LEN
BATCHES: dict[str, Batch] = {
    "one": [1],
    "plain": [1] * 5,
    "drafted": [3, 1, 9, 17, 2],
    "alike": [LONGEST] * 4,
    "with a prompt": [1, 4, 200],
    "large": [7] * MAX_NUM_SEQUENCES,
    "too large": [9] * MAX_NUM_SEQUENCES,
}
ROWS = (1, 8, 32, 80, 224, 448)


@pytest.fixture(params=["runner V1", "runner V2"])
def dispatch_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Dispatch]:
    """Given the mode of the arguments ("": ours) and what the backends support."""
    prepare_environment()
    make = _v1 if request.param == "runner V1" else _v2

    def of(mode: str, support: str) -> Dispatch:
        from vllm.config import CompilationMode
        from vllm.config.compilation import CompilationConfig
        from vllm.v1.attention.backend import AttentionCGSupport

        from engine.vllm.graphs import capture_any_lengths, prepared_rows

        more = {"compilation_config": {"cudagraph_mode": mode}} if mode else {}
        asked = vllm_arguments("cuda", {"max_num_sequences": MAX_NUM_SEQUENCES, "max_pass_tokens": 1024}, **more)
        compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, **asked["compilation_config"])
        compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]
        compilation.set_splitting_ops_for_v1("naive")
        config = SimpleNamespace(
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQUENCES),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
            lora_config=None,
            num_speculative_tokens=MAX_DRAFT_LEN,
        )
        capture_any_lengths(config)  # type: ignore[arg-type]
        dispatch = make(config, AttentionCGSupport[support], monkeypatch)
        sizes = prepared_rows(compilation, 1024)

        def dispatched(batch: Batch) -> tuple[str, int]:
            kind, num_rows = dispatch(batch)
            planned = next((size for size in sizes if size >= sum(batch)), sum(batch))
            assert sum(batch) <= num_rows <= planned, "the planner expects no smaller graph"
            return kind, num_rows

        return dispatched

    return of


def _v1(config: Any, support: Any, monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(support, "backend", LONGEST)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(mode, LONGEST)

    def dispatch(batch: Batch) -> tuple[str, int]:
        is_uniform = GPUModelRunner._is_uniform_decode(max(batch), LONGEST, sum(batch), len(batch))
        found, of = dispatcher.dispatch(sum(batch), is_uniform)
        return found.name, of.num_tokens

    return dispatch


def _v2(config: Any, support: Any, monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    from vllm.v1.worker.gpu import cudagraph_utils

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(support, "backend", LONGEST, use_v2_model_runner=True)
    manager = cudagraph_utils.CudaGraphManager(config, None, mode, LONGEST)
    manager._graphs_captured = True

    def dispatch(batch: Batch) -> tuple[str, int]:
        alike = batch[0] if len(set(batch)) == 1 else None
        longest = max(batch) if max(batch) <= LONGEST else None  # None: a prompt is among them
        found = manager.dispatch(len(batch), sum(batch), alike, 0, longest)
        return found.cg_mode.name, found.num_tokens

    return dispatch


def test_full_graphs_serve_any_lengths_where_the_backends_allow_it(dispatch_of: Callable[[str, str], Dispatch]) -> None:
    dispatch = dispatch_of("", "ALWAYS")
    found = {name: dispatch(batch) for name, batch in BATCHES.items()}
    assert found.pop("too large") == ("NONE", 576)
    assert list(found.values()) == [("FULL", rows) for rows in ROWS]


@pytest.mark.parametrize("support", ["UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER"])
def test_elsewhere_piecewise_graphs_do(dispatch_of: Callable[[str, str], Dispatch], support: str) -> None:
    dispatch = dispatch_of("", support)
    kinds = {name: dispatch(batch)[0] for name, batch in BATCHES.items()}
    assert kinds.pop("too large") == "NONE"
    assert kinds.pop("alike") == ("FULL" if support == "UNIFORM_BATCH" else "PIECEWISE")
    assert set(kinds.values()) == {"PIECEWISE"}


def test_a_mode_of_the_users_is_kept(dispatch_of: Callable[[str, str], Dispatch]) -> None:
    assert dispatch_of("PIECEWISE", "ALWAYS")([3, 1]) == ("PIECEWISE", 4)
    assert dispatch_of("NONE", "ALWAYS")([3, 1]) == ("NONE", 4)
