"""From the configuration to a target that is ready to serve."""

from collections.abc import Sequence

from cluster.config import Config
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from engine.calibration import measure_cost
from engine.factory import load_target as load_native
from engine.models.config import load_config
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from engine.native import NativeTarget
from router.cost_model import TableCost


def load_target(config: Config, feature_layers: Sequence[int] = ()) -> tuple[NativeTarget, ModelInfo, TableCost]:
    """The target of a resolved configuration, what others must know of its model, and the measured cost of its passes.

    Args:
        feature_layers: as of ``NativeTarget``.

    Raises:
        ModelUnavailable: missing, half-written or unsupported; one line that says which.
        InvalidField: more than one rank; or the KV cache cannot hold one sequence of the longest kind.
    """
    target = config.target
    if target.tensor_parallel > 1:
        raise InvalidField("target.tensor_parallel", target.tensor_parallel, "must be 1: the native engine runs on one rank")
    folder = ensure_model(config.model.name)
    model = load_config(folder)
    info = ModelInfo(
        name=config.model.name.rstrip("/").rsplit("/", 1)[-1],
        vocab_size=model.vocab_size,
        max_model_len=min(config.model.max_model_len, model.max_len),
        eos_token_ids=model.eos_token_ids,
        tokenizer_fingerprint=fingerprint(folder),
    )
    engine = load_native(
        folder,
        dtype=target.dtype,
        device=target.device,
        kv_cache_bytes=int(target.kv_cache_gb * 2**30),
        block_len=target.block_len,
        max_num_sequences=target.max_num_sequences,
        max_pass_tokens=target.max_pass_tokens,
        max_model_len=info.max_model_len,
        feature_layers=feature_layers,
    )
    return engine, info, measure_cost(engine)
