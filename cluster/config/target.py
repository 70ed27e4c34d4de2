"""The section ``target``."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cluster.config.section import Auto, Count, Device, Engine, Replicated, Resources, Section, TargetDtype, former
from cluster.model_name import HubName
from cluster.types import Adapter

# Arguments of vLLM's ``EngineArgs`` that ``target.vllm`` may not name, and the field of ours that sets each.
OURS = {
    "model": "model.name",
    "served_model_name": "model.served_names",
    "revision": "model.name: ORG/MODEL@REVISION",
    "max_model_len": "model.max_model_len",
    "generation_config": "model.generation_config",
    "dtype": "target.dtype",
    "tensor_parallel_size": "target.tensor_parallel",
    "block_size": "target.block_len",
    "kv_cache_memory_bytes": "target.kv_cache_gb",
    "gpu_memory_utilization": "target.gpu_memory_utilization",
    "max_num_seqs": "target.max_num_sequences",
    "max_num_batched_tokens": "target.max_pass_tokens",
    "data_parallel_size": "target.replicas",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "drafters"),
    "reasoning_parser": "api.reasoning_parser",
    "otlp_traces_endpoint": "observability.otlp_endpoint",
}
# argument: why it cannot be set
OWNED = {
    **dict.fromkeys(("scheduler_cls", "scheduling_policy"), "the round schedules"),
    "worker_cls": "the worker samples by Outrider's rule",
    "distributed_executor_backend": "ranks are child processes of the target's",
    "async_scheduling": "the round waits for each pass",
    "additional_config": "it carries the layers that drafters read",
    "skip_tokenizer_init": "the API's processes hold the tokenizer",
    "disable_log_stats": "Outrider has statistics of its own",
    "use_tqdm_on_load": "the log of a target has no terminal",
    **dict.fromkeys(("max_num_scheduled_tokens", "enable_chunked_prefill"), "the round plans each pass"),
    "logits_processors": "the sampler is Outrider's",
    "override_generation_config": "the API has the sampling defaults",
    "pipeline_parallel_size": "one pass runs at a time, so stages would wait for each other",
    **dict.fromkeys(("runner", "convert"), "only text generation is served"),
}
_REFUSED = {**{name: f"set {field} instead" for name, field in OURS.items()}, **OWNED}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError: names an argument that the loop or another field sets."""
    for name in arguments:
        if name in _REFUSED:
            raise ValueError(f"{name} cannot be set here: {_REFUSED[name]}")


class LoraModule(Section):
    """A LoRA adapter of the served model."""

    name: str = Field(min_length=1, max_length=256)  # which calls give as model
    path: Path  # folder in PEFT's format, on every machine with a target, or ORG/NAME[@REVISION] of a hub
    removed = former(base_model_name="it is always the served model")

    @property
    def adapter(self) -> Adapter:
        """One of a hub has a revision (`deploy.model_files`)."""
        key = blake2b(f"{self.name}\0{self.path}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        named = HubName.parse(str(self.path))
        is_pinned = named is not None and named.revision is not None
        return Adapter(self.name, str(self.path if is_pinned else self.path.expanduser().absolute()), key)

    def check(self, where: str, names: Sequence[str]) -> None:
        """Raises ValueError unless it fits the model with these ``names``."""
        if self.name in names:
            raise ValueError(f"{where}.name: must differ from the names of the model, got {self.name!r}")


LONG_PASS = 2048  # rows, as vLLM takes by default
SHORT_CHUNK = 256  # rows of prompts where passes have next to no fixed cost: live streams wait for them


class TargetConfig(Replicated):
    """The verifying engine and its replicas."""

    engine: Engine = "auto"  # vllm: in an environment of its own (`make setup-vllm`); auto: there, on a GPU; else native
    dtype: TargetDtype = "auto"  # as-shipped: of a GGUF file, on the native engine; float16: on vllm
    device: Device = "auto"
    replicas: Count = 1  # at start
    min_replicas: Count | None = None  # None: as replicas
    max_replicas: Count | None = None
    tensor_parallel: Count = 1  # ranks of one replica; at most the model's key-value heads
    block_len: Literal[16, 32, 64] = 32  # tokens of a KV cache block
    # Of one rank. auto: 0.5 on a CPU; on a GPU what weights, passes and colocated drafters leave of gpu_memory_utilization.
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] | Auto = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9  # of the GPU that resources.gpus gives it
    max_num_sequences: Count = 64  # running at once in one replica
    # Rows of one packed pass. auto: 512 for the native engine on a CPU, whose passes have next to no fixed cost, else 2,048.
    max_pass_tokens: Count | Auto = "auto"
    # auto: rows of draft tokens that will not be accepted leave a pass between its layers, while that saves time.
    early_exit: Literal["auto", "off"] = "off"
    # Drafters in the target's process draft in a part of its device while it verifies in the other, or by turns with it.
    # auto: whichever `outrider profile` has measured to be faster, without a profile by turns; on: in parts; off: by turns.
    partition: Literal["auto", "on", "off"] = "auto"
    resources: Resources = Resources()  # of one rank
    vllm: Mapping[str, Any] = {}  # engine vllm: further arguments of its EngineArgs, such as quantization
    lora_modules: tuple[LoraModule, ...] = Field(default=(), max_length=256)  # engine vllm
    removed = former(prefill_chunk_len="it follows from max_pass_tokens and the engine")

    @property
    def num_adapters(self) -> int:
        """LoRA adapters at once, each with a place in every layer: ``max_loras``, and all of ``lora_modules``."""
        if not (self.lora_modules or self.vllm.get("enable_lora")):
            return 0
        return max(int(self.vllm.get("max_loras", 1)), len(self.lora_modules))

    @property
    def kv_cache_bytes(self) -> int:
        """``kv_cache_gb`` as a number."""
        return int(2**30 * (0.5 if self.kv_cache_gb == "auto" else self.kv_cache_gb))

    @property
    def can_divide(self) -> bool:
        """Whether its device may be divided with drafters: one process computes, on threads and streams of ours."""
        return self.engine != "vllm" and self.tensor_parallel == 1

    @property
    def longest_pass(self) -> int:
        """Rows; ``max_pass_tokens`` as a number. Every running sequence computes a token in each pass."""
        usual = max(LONG_PASS if self._has_fixed_cost else 512, self.max_num_sequences)
        return usual if self.max_pass_tokens == "auto" else self.max_pass_tokens

    @property
    def longest_chunk(self) -> int:
        """Rows of all prompts in a pass, beside live streams."""
        return min(LONG_PASS if self._has_fixed_cost else SHORT_CHUNK, self.longest_pass)

    @property
    def _has_fixed_cost(self) -> bool:
        return self.engine == "vllm" or self.device == "cuda"

    @field_validator("block_len")
    @classmethod
    def _block_fits_engine(cls, block_len: int, info: ValidationInfo) -> int:
        if info.data.get("engine") == "vllm" and block_len % 32:
            raise ValueError(f"must be 32 or 64 on the vllm engine, got {block_len}")
        return block_len

    @field_validator("vllm")
    @classmethod
    def _arguments_fit(cls, arguments: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        if arguments and info.data.get("engine") != "vllm":
            raise ValueError("must be empty unless engine is vllm")
        check_arguments(arguments)
        if type(most := arguments.get("max_loras", 1)) is not int:
            raise ValueError(f"max_loras must be an integer, got {most!r}")
        return arguments

    @field_validator("lora_modules")
    @classmethod
    def _adapters_fit(cls, modules: tuple[LoraModule, ...], info: ValidationInfo) -> tuple[LoraModule, ...]:
        if modules and info.data.get("engine") != "vllm":
            raise ValueError("must be empty on the native engine, whose layers take no low-rank changes: set engine to vllm")
        if len({module.name for module in modules}) < len(modules):
            raise ValueError(f"names must differ, got {[module.name for module in modules]}")
        return modules

    @field_validator("dtype")
    @classmethod
    def _dtype_fits_engine(cls, dtype: str, info: ValidationInfo) -> str:
        if dtype == "float16" and info.data.get("engine") != "vllm":
            raise ValueError("must be auto, as-shipped, bfloat16 or float32 on the native engine, got 'float16'")
        if dtype == "as-shipped" and info.data.get("engine") == "vllm":
            raise ValueError("must be auto, bfloat16, float16 or float32 on vllm, got 'as-shipped'")
        return dtype

    @field_validator("early_exit")
    @classmethod
    def _early_exit_fits_engine(cls, early_exit: str, info: ValidationInfo) -> str:
        if early_exit == "off":
            return early_exit
        if info.data.get("engine") == "vllm":
            raise ValueError("must be off on the vllm engine, got 'auto': its passes cannot be stopped between layers")
        return early_exit

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.resources.check_device(self.device)
        has_gpus = self.device == "cuda" or self.resources.gpus not in ("auto", 0)
        if self.dtype == "as-shipped" and (has_gpus or self.tensor_parallel > 1):
            raise ValueError("dtype as-shipped needs a device of auto or cpu, no GPUs, and tensor_parallel 1")
        if self.partition == "on" and not self.can_divide:
            raise ValueError("partition must be auto or off on the vllm engine or with several ranks, got 'on'")
        if self.tensor_parallel > 1 and self.resources.gpus != "auto" and 0 < self.resources.gpus < 1:
            raise ValueError(
                f"resources.gpus must be auto or a whole number with tensor_parallel above 1, got {self.resources.gpus}: "
                "NCCL refuses two ranks on one GPU"
            )
        if self.max_num_sequences > self.longest_pass:
            raise ValueError(
                f"max_num_sequences ({self.max_num_sequences}) must be at most max_pass_tokens ({self.longest_pass})"
            )
        return self
