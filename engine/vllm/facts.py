"""What vLLM knows of a model without loading it, read in a process of its own: importing vLLM takes seconds and half a
gigabyte, and sets the environment of its process."""

import json
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from cluster.config import Config
from cluster.errors import InvalidField, ModelUnavailable
from engine.dtypes import choose_dtype
from engine.model_facts import ModelFacts
from engine.vllm.arguments import check_names
from engine.vllm.environment import require_vllm

TIMEOUT_S = 300.0


def read_vllm_facts(config: Config, folder: Path, in_process: bool) -> ModelFacts:
    """Raises as ``engine.model_facts.read_facts``, and InvalidField: vLLM is missing or of another version."""
    require_vllm()
    target = config.target
    check_names(target.vllm)
    arguments = {
        **target.vllm,
        "model": str(folder),
        "dtype": choose_dtype(target.dtype, target.device, engine="vllm"),
        "tensor_parallel_size": target.tensor_parallel,
        "skip_tokenizer_init": True,
    }
    answer = _read(arguments) if in_process else _asked(json.dumps(arguments))
    if (ranks := answer.get("ranks")) is not None:
        raise InvalidField("target.tensor_parallel", target.tensor_parallel, ranks)
    if (refused := answer.get("refused")) is not None:
        raise ModelUnavailable(f"{folder}: vLLM refuses it: {refused}")
    return ModelFacts(**{**answer, "eos_token_ids": tuple(answer["eos_token_ids"])})


@cache
def _asked(arguments: str) -> dict[str, Any]:
    """``_read`` in a child process, of the keywords of ``EngineArgs`` as JSON."""
    command = [sys.executable, "-m", "engine.vllm.facts"]
    try:
        child = subprocess.run(command, input=arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"vLLM did not tell what the model is within {TIMEOUT_S:g} s") from error
    lines = child.stdout.strip().splitlines()
    if child.returncode != 0 or not lines:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise ModelUnavailable(f"vLLM could not read the model: {last}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _read(arguments: dict[str, Any]) -> dict[str, Any]:
    """The facts, or one line that says why there are none."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    asked = EngineArgs(**arguments)
    try:
        model = asked.create_model_config()
    except (ValueError, OSError, ImportError) as error:  # of pydantic, transformers, or the model's own code
        return {"refused": _line(error)}
    parallel = ParallelConfig(
        tensor_parallel_size=asked.tensor_parallel_size, enable_expert_parallel=asked.enable_expert_parallel
    )
    try:
        model.verify_with_parallel_config(parallel)
    except (ValueError, NotImplementedError) as error:
        return {"ranks": _line(error)}
    element_bytes = kv_cache_dtype_str_to_dtype(str(asked.kv_cache_dtype), model).itemsize
    num_vectors = 1 if model.use_mla else 2  # of a position and a head: MLA keeps one for keys and values
    heads_bytes = model.get_num_kv_heads(parallel) * model.get_head_size() * element_bytes
    eos = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_text_config, "eos_token_id", None))
    facts = ModelFacts(
        vocab_size=model.get_vocab_size(),
        max_len=model.max_model_len,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        hidden_size=model.get_hidden_size(),
        num_layers=model.get_total_num_hidden_layers(),
        kv_bytes_per_token=num_vectors * model.get_num_layers(parallel) * heads_bytes,
        weight_share=1 / asked.tensor_parallel_size,
        useful_threads=None,
    )
    return asdict(facts)


def _line(error: Exception) -> str:
    """Without the frame that pydantic puts round its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Value error, " in line), " ".join(lines))
    return told.replace("Value error, ", "").partition(" [type=")[0]


def _main() -> None:
    from engine.vllm.environment import prepare_environment

    prepare_environment()
    print(json.dumps(_read(json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    _main()
