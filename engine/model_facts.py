"""What a deployment asks of the served model before its target is loaded, whichever engine reads the model. No torch."""

from dataclasses import dataclass
from pathlib import Path

from cluster.config import Config
from engine.dtypes import choose_dtype
from engine.models.config import DecoderConfig, load_config
from engine.tensor_parallel.sharding import check_ranks, shard_of

# Weights per thread of a product. Kernels use two threads from twice as many weights on (threads_for in cpu/vectors.h);
# below that, synchronisation costs what the second thread saves.
WEIGHTS_PER_THREAD = 2**16


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of the model of a configuration on its engine, without loading weights."""

    vocab_size: int
    max_len: int  # tokens of the longest sequence that the model computes
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int
    kv_bytes_per_token: int  # of the first rank, the largest; an upper bound where some layers keep a window alone
    weight_share: float  # of the first rank
    useful_threads: int | None  # that shorten a pass of one row on a CPU; None: as many as there are


def read_facts(config: Config, folder: Path, *, in_process: bool = False) -> ModelFacts:
    """The facts of the model in ``folder`` as the configuration serves it. The first call for vLLM takes seconds: vLLM is
    imported in a process of its own, or in this one (``in_process``), which must have set its environment.

    Raises ModelUnavailable: the engine does not compute this model; InvalidField: it cannot be split over so many ranks, or
    an argument of ``target.vllm`` is wrong.
    """
    target = config.target
    if target.engine == "vllm":
        from engine.vllm.facts import read_vllm_facts

        return read_vllm_facts(config, folder, in_process)
    model = load_config(folder)
    check_ranks(model, target.tensor_parallel)
    shard = shard_of(model, 0, target.tensor_parallel).config_of(model)
    dtype = choose_dtype(target.dtype, target.device, is_final=False)
    return ModelFacts(
        vocab_size=model.vocab_size,
        max_len=model.max_len,
        eos_token_ids=model.eos_token_ids,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        kv_bytes_per_token=shard.kv_bytes_per_token(4 if dtype == "float32" else 2),
        weight_share=shard.num_kv_heads / model.num_kv_heads,
        useful_threads=useful_threads(model),
    )


def max_model_len(config: Config, facts: ModelFacts) -> int:
    """Tokens of the longest sequence that is served."""
    asked, target = config.model.max_model_len, config.target
    if asked != "auto":
        return min(asked, facts.max_len)
    num_blocks = target.kv_cache_bytes // (facts.kv_bytes_per_token * target.block_len) - 1  # vLLM pads with one
    return max(1, min(facts.max_len, num_blocks * target.block_len))


def useful_threads(config: DecoderConfig) -> int:
    """Threads that shorten a decode pass of one row, by the mean size of its products."""
    c = config
    sizes = [
        (c.q_size + 2 * c.kv_size) * c.hidden_size,
        c.hidden_size * c.q_size,
        2 * c.intermediate_size * c.hidden_size,
        c.hidden_size * c.intermediate_size,
    ]
    return max(1, sum(sizes) // len(sizes) // WEIGHTS_PER_THREAD)
