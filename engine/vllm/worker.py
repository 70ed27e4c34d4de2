"""vLLM's workers with our model runners. vLLM loads them by their qualified names, in the processes of all ranks."""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.v1.worker import cpu_worker, gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from engine.vllm.adapters import checked, place
from engine.vllm.graphs import capture_any_lengths

logger = logging.getLogger(__name__)


class RankWorker:
    """What a worker in a process of its own adds to vLLM's: it ends with the target's process, and when it has failed.

    vLLM lets it end by itself, which a rank in a collective of ranks that have ended never does.
    """

    rank: int
    model_runner: Any
    _checked: "LoRAModel | None" = None  # adapter that is to be placed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        capture_any_lengths(self.vllm_config)  # type: ignore[attr-defined]
        target = multiprocessing.parent_process()
        self._is_child = target is not None and self.parallel_config.world_size > 1  # type: ignore[attr-defined]
        if target is not None and self._is_child:
            threading.Thread(target=_end_after, args=(target,), name="end with the target", daemon=True).start()

    def embedding_rows(self) -> torch.Tensor:
        """Of this rank; a rank in a process of its own sends a copy."""
        rows: torch.Tensor = self.model_runner.embedding
        return rows.cpu() if self._is_child else rows

    def draft(self, num_tokens: int) -> dict[str, list[int]] | str:
        """Of vLLM's own proposer, after the last pass, or why there are none; every rank takes part."""
        drafts: dict[str, list[int]] = {}
        return _fault("vLLM's own proposer failed", lambda: drafts.update(self.model_runner.draft(num_tokens))) or drafts

    def check_adapter(self, request: LoRARequest) -> str | None:
        """Why it cannot be used; None: it can be placed. vLLM's next pass would raise, too."""
        self._checked = None

        def check() -> None:
            self._checked = checked(request, self.model_runner.lora_manager)

        return _fault(f"the adapter in {request.lora_path} cannot be used", check)

    def place_adapter(self, request: LoRARequest) -> str | None:
        """As ``check_adapter``, which was called last; None: it is loaded."""
        lora, self._checked = self._checked, None
        assert lora is not None, "an adapter is checked before it is placed"
        manager = self.model_runner.lora_manager
        return _fault(f"the adapter in {request.lora_path} cannot be placed", lambda: place(lora, manager))

    def execute_model(self, scheduler_output: Any) -> Any:
        try:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        except Exception:
            self._end_unheard()
            raise

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        except Exception:
            self._end_unheard()
            raise

    def _end_unheard(self) -> None:
        """Of rank 0 the executor hears the error. Another rank would go on, without the tokens of this pass."""
        if self._is_child and self.rank > 0:
            logger.exception("rank %d failed and ends", self.rank)
            os._exit(1)


def _fault(meaning: str, act: Callable[[], None]) -> str | None:
    """The error that ``act`` raised, as text; None if it raised none. vLLM stops at the first rank that raises one,
    and leaves the answers of the others unread."""
    try:
        act()
    except Exception as error:
        logger.warning("%s", meaning, exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


def _end_after(target: Any) -> None:
    target.join()
    os._exit(1)


class Worker(RankWorker, CPUWorker):
    """On CPUs. vLLM's worker builds the runner that a module of its own names: another one is named while it does."""

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu import model_runner as module

            from engine.vllm.runner_v2 import CpuRunner
        else:
            from engine.vllm.runner_v1 import CpuRunner

            module = cpu_worker
        runner = module.CPUModelRunner
        module.CPUModelRunner = CpuRunner
        try:
            super().init_device()
        finally:
            module.CPUModelRunner = runner


class GpuWorker(RankWorker, gpu_worker.Worker):
    """On GPUs; never run so far."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from engine.vllm.runner_v2 import ExactRunner
        else:
            from engine.vllm.runner_v1 import ExactRunner
        return ExactRunner(self.vllm_config, self.device)
