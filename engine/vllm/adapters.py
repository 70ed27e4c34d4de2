"""LoRA adapters in vLLM's slots: which are loaded, and whether their files fit the model."""

from collections.abc import Collection
from itertools import count
from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.executor import Executor

from cluster.errors import InvalidField, ModelUnavailable, Overloaded
from cluster.types import Adapter
from engine.adapter_files import RETRY_AFTER_S, adapter_folder


class AdapterSlots:
    """As many adapters as ``num_slots`` are loaded at once, in all ranks: vLLM computes no pass with more."""

    def __init__(self, executor: Executor, num_slots: int) -> None:
        self._executor = executor
        self._num_slots = num_slots
        self._loaded: dict[Adapter, LoRARequest] = {}  # least recently loaded or asked for first
        self._ids = count(1)

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._loaded

    def load(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        """As `engine.target.AdapterHost.load_adapter`. Another one gives way when all ranks have checked the files."""
        known = self._loaded.pop(adapter, None)
        if known is None:
            idle = self._to_evict(adapter, in_use)
            try:
                folder = str(adapter_folder(adapter.path))
            except ModelUnavailable as error:  # the hub's cache has lost it since it was read
                raise InvalidField("lora_path", adapter.path, f"cannot be read: {error}") from error
            # vLLM keys its prefix cache by name and path.
            known = LoRARequest(f"{adapter.name} {adapter.key}", next(self._ids), folder)
            self._call("check_adapter", adapter, known)
            if idle is not None:
                self._remove(self._loaded.pop(idle))
            try:
                self._call("place_adapter", adapter, known)
            except InvalidField:
                self._remove(known)
                raise
        self._loaded[adapter] = known

    def request_of(self, adapter: Adapter) -> LoRARequest:
        return self._loaded[adapter]

    def _call(self, method: str, adapter: Adapter, request: LoRARequest) -> None:
        """Of all ranks. Raises InvalidField."""
        faults = [fault for fault in self._executor.collective_rpc(method, args=(request,)) if fault]
        if faults:
            raise InvalidField("lora_path", adapter.path, f"is no adapter of this model: {faults[0]}")

    def _to_evict(self, adapter: Adapter, in_use: Collection[Adapter]) -> Adapter | None:
        if not self._num_slots:
            raise InvalidField("model", adapter.name, "is an adapter, and this target was started without enable_lora")
        if len(self._loaded) < self._num_slots:
            return None
        idle = next((one for one in self._loaded if one not in in_use), None)
        if idle is None:
            raise Overloaded(f"all {self._num_slots} adapters that fit (max_loras) have requests", RETRY_AFTER_S)
        return idle

    def _remove(self, request: LoRARequest) -> None:
        self._executor.collective_rpc("remove_lora", args=(request.lora_int_id,))


def checked(request: LoRARequest, worker: WorkerLoRAManager) -> LoRAModel:
    """In the process of a rank. Raises all kinds of errors, which say why the adapter cannot be used."""
    lora = worker._load_adapter(request)
    _check_shapes(lora.loras, worker._adapter_manager)
    return lora


def place(lora: LoRAModel, worker: WorkerLoRAManager) -> None:
    """Where ``checked`` was called. Raises all kinds of errors."""
    worker._adapter_manager.add_adapter(lora)
    worker._adapter_manager.activate_adapter(lora.id)


def _check_shapes(weights: dict[str, Any], manager: Any) -> None:
    """vLLM copies what is too small into a corner of its buffers, and passes over layers that the model does not have."""
    known = set()
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        known.update(parts)
        base = module.base_layer
        inputs = getattr(base, "input_size", None)
        outputs = getattr(base, "output_sizes", None) if len(parts) > 1 else [getattr(base, "output_size", None)]
        if inputs is None or outputs is None or len(outputs) != len(parts):
            continue  # an embedding, or experts: vLLM looks at their shapes itself
        for part, num_outputs in zip(parts, outputs, strict=True):
            one = weights.get(part)
            if one is None:
                continue
            a, b = (None if matrix is None else tuple(matrix.shape) for matrix in (one.lora_a, one.lora_b))
            rows = num_outputs if module.tp_size == 1 and num_outputs else b[0] if b else 0  # ranks may repeat KV heads
            if (a, b) != ((one.rank, inputs), (rows, one.rank)):
                raise ValueError(f"{part} has matrices of {a} and {b}, not {(one.rank, inputs)} and {(rows, one.rank)}")
    unknown = next((name for name in weights if name not in known and ".experts" not in name), None)
    if unknown is not None and manager.lora_config.target_modules is None and not manager.supports_mm:
        raise ValueError(f"the model has no layer {unknown} that takes low-rank changes")
