"""vLLM's ``--speculative-config``, translated into a drafter of the pool."""

import difflib
from collections.abc import Mapping
from typing import Any

from cluster.config import HIDDEN_STATE_FORMS
from cluster.errors import InvalidField

FLAG = "--speculative-config"
_COMMON = ("method", "model", "num_speculative_tokens", "revision")
# By method: the drafter's kind, and the options that vLLM's keys become.
METHODS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ngram": ("ngram", {"prompt_lookup_max": "max_match_len", "prompt_lookup_min": "min_match_len"}),
    "suffix": ("suffix", {"suffix_decoding_max_tree_depth": "max_match_len"}),
    "draft_model": ("model", {"model": "model"}),
    **{kind: (kind, {"model": "path"}) for kind, form in HIDDEN_STATE_FORMS.items() if not form.is_proposed},
}
PROPOSED = [kind for kind, form in HIDDEN_STATE_FORMS.items() if form.is_proposed]
PROPOSERS = ("eagle", "mtp", *PROPOSED)  # that stay vLLM's own; and those of one model's MTP heads, as mimo_mtp
# Of vLLM's proposers and rejection sampler, without a counterpart: a draft token is accepted if the target samples it.
_WITHOUT = {
    *("rejection_sample_method", "draft_sample_method", "enforce_eager", "disable_padded_drafter_batch", "moe_backend"),
    *("attention_backend", "max_model_len", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "enable_adaptive_verification", "use_local_argmax_reduction"),
    *("num_speculative_tokens_per_batch_size", "code_revision", "kv_cache_dtype", "draft_load_config"),
}


def drafter_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A drafter of the file without its name, and a line for each key that changes nothing. Raises InvalidField: a method
    that is not supported, or a key that is unknown or missing."""
    method = config.get("method") or ("draft_model" if "model" in config else None)
    if method is None:
        raise InvalidField(FLAG, dict(config), 'needs "method", or "model" for a draft model')
    length = config.get("num_speculative_tokens")
    common = {} if length is None else {"max_draft_len": length}
    if method in PROPOSERS or method.endswith("_mtp"):
        own = {key: value for key, value in config.items() if key != "num_speculative_tokens"}
        return {**common, "options": {"kind": "vllm", "speculative": own}}, []
    if method not in METHODS:
        supported = ", ".join([*METHODS, *PROPOSERS])
        raise InvalidField(FLAG, method, f"this method is not supported yet; supported are {supported}")
    kind, renamed = METHODS[method]
    options: dict[str, Any] = {"kind": kind}
    notes = []
    for key, value in config.items():
        if key in renamed:
            options[renamed[key]] = value
        elif key in ("draft_tensor_parallel_size", "quantization"):
            if value not in (None, 1):
                raise InvalidField(f"{FLAG}.{key}", value, "is not supported: drafters run unquantised in one process")
        elif key in _WITHOUT:
            notes.append(f"{key} has no counterpart")
        elif key not in _COMMON:
            known = [*_COMMON, *renamed]
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known with {method} are {', '.join(known)}"
            raise InvalidField(f"{FLAG}.{key}", value, f"is unknown; {hint}")
    if "model" in renamed:
        if "model" not in config:
            raise InvalidField(FLAG, dict(config), f'method {method} needs "model"')
        if config.get("revision") is not None:
            options[renamed["model"]] += f"@{config['revision']}"
    return {**common, "options": options}, notes
