"""The class that vLLM 0.32 and 0.33 make for ``method: custom_class``: `vllm/v1/spec_decode/custom_class_proposer.py`."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from cluster.config import DrafterConfig, DrafterOptions, TableOptions, parts_of
from cluster.config.drafters import DEFAULT_DRAFTERS
from cluster.errors import InvalidField
from cluster.types import ModelInfo
from drafters.protocol import Demand, Drafter
from drafters.registry import make_drafter
from drafters.vllm_plugin.elsewhere import URL_SETTING, DraftersElsewhere, dialled
from drafters.vllm_plugin.lengths import MeasuredLengths
from drafters.vllm_plugin.rows import Row, RowSessions

logger = logging.getLogger(__name__)

SETTING = "OUTRIDER_DRAFTER"  # a drafter's ``options`` as JSON; without it the default pool's cascade of lookups


class PoolProposer:
    """Drafts for the rows of vLLM's batch, on its engine's thread.

    Drafts are a guess that vLLM verifies: greedy outputs are those without it, and sampled ones have vLLM's distribution.
    A drafter that raises is logged and not called again; the lookups take over from a drafter elsewhere.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        clock: in seconds.

    Raises:
        InvalidField: SETTING is no drafter, or one with a model; URL_SETTING is no address, or its files cannot be used.
        IncompatibleTokenizer: the table was counted for another tokenizer.
    """

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._draft_len = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(self._model.max_model_len)
        self._is_read = int(parallel.rank) % int(parallel.tensor_parallel_size) == 0  # of the ranks vLLM reads one
        max_pass_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._lengths = MeasuredLengths(str(vllm_config.device_config.device_type), max_pass_tokens, clock)
        drafter = _lookups(os.environ.get(SETTING), self._model)
        if self._is_read and (url := os.environ.get(URL_SETTING)):
            target = _target(self._model, with_tokenizer=True)
            drafter = DraftersElsewhere(drafter, dialled(url, target), target, self._lengths, self._draft_len, clock)
        self._drafter: Drafter | None = drafter
        self._sessions = RowSessions(drafter)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Called by vLLM; lookups have no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft tokens of each row.

        Args:
            sampled_token_ids: of each row; empty while its prompt is computed.
            num_tokens_no_spec: tokens of each row, the sampled ones included.
            token_ids_cpu: (rows, longest); both arrays have more rows than the batch.
        """
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafter is None or not self._is_read:
            return nothing
        lens = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        rows = [
            Row(index, token_ids_cpu[index, :length], len(new))
            for index, (new, length) in enumerate(zip(sampled_token_ids, lens, strict=True))
        ]
        try:
            return self._drafts(rows, self._drafter)
        except Exception:  # a drafter's fault costs speed alone
            logger.exception("the drafter failed, and is not called again")
            self._replace(self._drafter)
            return nothing

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        self._sessions.check_integrity()

    def _drafts(self, rows: Sequence[Row], drafter: Drafter) -> list[list[int]]:
        self._lengths.note_pass(self._sessions.follow(rows))
        drafted = [row for row in rows if row.num_new]
        committed = [len(row.token_ids) for row in drafted]
        demands = [
            Demand(self._sessions.request_id(row), max(0, min(self._draft_len, self._max_model_len - 1 - length)))
            for row, length in zip(drafted, committed, strict=True)
        ]
        drafts = drafter.propose(demands) if demands else []
        found: list[list[int]] = [[] for _ in rows]
        for row, draft, length in zip(drafted, drafts, self._lengths.choose(drafts, committed), strict=True):
            found[row.index] = list(draft.token_ids[:length])
        return found

    def _replace(self, failed: Drafter) -> None:
        self._drafter = None
        if isinstance(failed, DraftersElsewhere):
            self._drafter = _lookups(os.environ.get(SETTING), self._model)
            self._sessions = RowSessions(self._drafter)
            try:
                failed.close()
            except Exception:
                logger.exception("its link could not be closed")


def _lookups(setting: str | None, model: Any) -> Drafter:
    """``model``: vLLM's ``ModelConfig``."""
    options = DEFAULT_DRAFTERS[0].options if setting is None else _options_of(setting)
    if options.traits.has_model:
        raise InvalidField(
            SETTING, setting, f"must be a lookup or a cascade of lookups; {URL_SETTING} names one with a model"
        )
    counted = any(isinstance(part, TableOptions) and part.path is not None for part in parts_of(options))
    return make_drafter(DrafterConfig(name="plugin", options=options), _target(model, with_tokenizer=counted))


def _target(model: Any, *, with_tokenizer: bool) -> ModelInfo:
    return ModelInfo(
        name=str(model.model),
        vocab_size=int(model.get_vocab_size()),
        max_model_len=int(model.max_model_len),
        eos_token_ids=(),
        tokenizer_fingerprint=_fingerprint_of(str(model.tokenizer)) if with_tokenizer else "",
    )


def _options_of(setting: str) -> DrafterOptions:
    try:
        return TypeAdapter[DrafterOptions](DrafterOptions).validate_json(setting)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidField(SETTING, setting, f"must be a drafter's options as JSON: {where} {first['msg']}") from error


def _fingerprint_of(tokenizer: str) -> str:
    from engine.models.prepare import find_folder
    from engine.models.tokenizer import fingerprint

    return fingerprint(find_folder(tokenizer))
