"""How good a trained drafter is: its saved folder, opened as it is served, held against answers that it never saw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.config import DSparkOptions, LayersOptions
from cluster.types import SamplingParams
from drafters.dspark.backbone import Backbone
from drafters.dspark.checkpoint import TargetRows, load_network
from drafters.dspark.drafter import DSparkDrafter
from drafters.dspark.sequential import SequentialStage
from drafters.layers import load_layers
from drafters.model import ModelDrafter
from drafters.protocol import Drafter
from drafters.replay import Recording, Round, replay
from drafters.shipped import kind_of
from drafters.small_model import SmallModel
from drafters.table import FILE as TABLE_FILE
from drafters.table import FrequencyTable, TableDrafter
from drafters.training.corpus import Answer
from drafters.training.frozen import FrozenTarget
from drafters.training.hidden_states import HiddenStateReader, Rows
from engine.dtypes import choose_dtype
from engine.factory import DTYPES
from engine.sampling import Sampler

DRAFT_LENS = (4, 7)
_CACHE_TOKENS = 16384
_BLOCK_LEN = 32


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``accepted_len`` counts the bonus token. ``by_position``: of the drafts that reached a position, how many were right
    there; as many as there are positions that any draft reached."""

    draft_len: int
    temperature: float
    num_rounds: int
    accepted_len: float
    by_position: tuple[float, ...]
    by_domain: dict[str, float]  # accepted length


class ReplayedFeatures:
    """The target behind a replay: serves a drafter the hidden states that were read before."""

    def __init__(self, readings: HiddenStateReader, answers: Iterable[Answer]) -> None:
        self._readings = readings
        self._answers = {name_of(answer): answer for answer in answers}
        self._held: dict[str, Tensor] = {}

    def hold(self, recording: Recording) -> None:
        (reading,) = self._readings.of([self._answers[recording.name]])
        self._held[recording.name] = reading.features

    def drop(self, recording: Recording) -> None:
        del self._held[recording.name]

    def read_hidden_states(self, request_id: str, start: int, stop: int) -> Tensor:
        if request_id not in self._held:
            raise LookupError(f"{request_id!r} is not held")
        return self._held[request_id][start:stop]


def evaluate(
    folder: Path,
    target: FrozenTarget,
    rows: Rows,
    readings: HiddenStateReader,
    answers: Sequence[Answer],
    draft_len: int,
) -> list[Round]:
    """The rounds of all answers, each at the temperature and with the noise that it was written with. The readings hold the
    layers that the drafter reads, and no others."""
    behind = ReplayedFeatures(readings, answers)
    drafter = open_drafter(folder, target, rows, behind)
    return list(replay(drafter, [_recording(answer) for answer in answers], draft_len, behind=behind))


def open_drafter(folder: Path, target: FrozenTarget, rows: Rows, features: ReplayedFeatures) -> Drafter:
    """The drafter in a folder that training wrote, with weights of the kind that it is served with where nothing else is
    asked for, with all of its drafts and its own confidences."""
    kind = kind_of(folder)
    if kind == "table":
        return TableDrafter(FrequencyTable.load(folder / TABLE_FILE), max_learned=0)
    info, num_blocks = target.info, _CACHE_TOKENS // _BLOCK_LEN
    if kind == "layers":
        served_as = choose_dtype(LayersOptions(path=str(folder)).dtype, target.device.type, allows_int8=True)
        model, output_ids = load_layers(folder, target.folder, served_as, str(target.device))
        small = SmallModel(
            model,
            num_blocks=num_blocks,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            output_ids=output_ids,
        )
        return ModelDrafter(small)
    served_as = choose_dtype(DSparkOptions(path=str(folder)).dtype, target.device.type, allows_int8=True)
    dtype, int8 = DTYPES[served_as], served_as == "int8"
    network = load_network(folder, TargetRows(rows.embedding, rows.head), dtype)
    sampler = Sampler(info.vocab_size, info.eos_token_ids)
    return DSparkDrafter(
        Backbone(network, dtype, target.device, int8=int8),
        SequentialStage(network, dtype, target.device, sampler, int8=int8),
        features,
        num_blocks=num_blocks,
        eos_token_ids=info.eos_token_ids,
    )


def acceptance(rounds: Sequence[Round], draft_len: int, temperature: float) -> Acceptance:
    reached, right = [0] * draft_len, [0] * draft_len
    by_domain: dict[str, list[int]] = {}
    for one in rounds:
        for k in range(min(len(one.confidences), one.num_accepted + 1)):
            reached[k] += 1
            right[k] += k < one.num_accepted
        by_domain.setdefault(one.domain, []).append(one.num_committed)
    return Acceptance(
        draft_len,
        temperature,
        len(rounds),
        float(np.mean([one.num_committed for one in rounds])) if rounds else 1.0,
        tuple(r / n for r, n in zip(right, reached, strict=True) if n),
        {domain: float(np.mean(lens)) for domain, lens in sorted(by_domain.items())},
    )


def name_of(answer: Answer) -> str:
    return f"{answer.key} {answer.temperature}"


def _recording(answer: Answer) -> Recording:
    sampling = SamplingParams(max_tokens=len(answer.answer_token_ids), temperature=answer.temperature, seed=answer.seed)
    return Recording(name_of(answer), answer.domain, answer.prompt_token_ids, answer.answer_token_ids, sampling)


def standardisation(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each dimension, fp32, over the rows of all tensors."""
    num = sum(len(part) for part in features)
    total = sum(part.double().sum(0) for part in features)
    squares = sum(part.double().square().sum(0) for part in features)
    mean = torch.as_tensor(total) / num
    variance = torch.as_tensor(squares) / num - mean.square()
    return mean.float(), variance.clamp_min(1e-6).sqrt().float()
