"""Accepted length and acceptance of a saved drafter, opened as in serving, on held-out answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.config import HiddenStateOptions, LayersOptions, TableOptions
from cluster.sampling_params import SamplingParams
from drafters.hidden_states.drafter import load_drafter
from drafters.hidden_states.features import FeatureShape
from drafters.hidden_states.formats import read_config
from drafters.protocol import Drafter
from drafters.registry import Site, make, make_table
from drafters.replay import Recording, Round, replay
from drafters.shipped import kind_of
from engine.dtypes import choose_dtype
from engine.target import FeatureSpan
from profiler.calibration import Calibration
from training.corpus import TargetAnswer
from training.frozen import FrozenTarget
from training.hidden_states import HiddenStateReader

DRAFT_LENS = (4, 7)
_CACHE_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Acceptance:
    draft_len: int
    temperature: float
    num_rounds: int
    accepted_len: float  # with the bonus token
    by_position: tuple[float, ...]  # share of right tokens, of the drafts right before it, where there were any
    by_domain: dict[str, float]  # accepted length


class ReplayedFeatures:
    """The target of a replay: serves the hidden states of the answers being replayed."""

    def __init__(self, reader: HiddenStateReader, answers: Sequence[TargetAnswer]) -> None:
        self._reader = reader
        self.shape: FeatureShape | None = None  # of the drafter; None: all that the reader reads
        self._answers = {answer.name: answer for answer in answers}
        self._held: dict[str, Tensor] = {}

    def hold(self, recording: Recording) -> None:
        (states,) = self._reader.read([self._answers[recording.name]])
        columns = None if self.shape is None else self.shape.columns_in(self._reader.layers)
        self._held[recording.name] = states.features if columns is None else states.features[:, columns]

    def drop(self, recording: Recording) -> None:
        del self._held[recording.name]

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], Tensor]:
        return [True] * len(spans), torch.cat([self._held[span.request_id][span.start : span.stop] for span in spans])


def evaluate(
    folder: Path,
    target: FrozenTarget,
    reader: HiddenStateReader,
    answers: Sequence[TargetAnswer],
    draft_len: int,
    calibration: Calibration | None = None,
) -> list[Round]:
    """The rounds of all answers, with the temperature and noise of their generation. ``calibration``: of a block drafter."""
    features = ReplayedFeatures(reader, answers)
    drafter = _open_drafter(folder, target, features, calibration)
    return list(replay(drafter, [_recording(answer) for answer in answers], draft_len, behind=features))


def _open_drafter(
    folder: Path, target: FrozenTarget, features: ReplayedFeatures, calibration: Calibration | None
) -> Drafter:
    """With the default dtype of serving and unlimited drafts."""
    path, site = str(folder), Site(target.info, str(target.device))
    match kind_of(folder):
        case "table":
            return make_table(TableOptions(path=path), site, max_learned=0)
        case "layers":
            return make(LayersOptions(path=path, min_survival=0.0).of_target(str(target.folder)), site)
    dtype = choose_dtype(HiddenStateOptions(path=path).dtype, target.device.type, allows_int8=True)
    features.shape = read_config(folder).features
    return load_drafter(
        folder, target.rows, dtype, target.info, target.device, features, num_blocks=_CACHE_BLOCKS, calibration=calibration
    )


def acceptance(rounds: Sequence[Round], draft_len: int, temperature: float) -> Acceptance:
    reached = [sum(k < min(len(one.confidences), one.num_accepted + 1) for one in rounds) for k in range(draft_len)]
    right = [sum(k < one.num_accepted for one in rounds) for k in range(draft_len)]
    by_domain: dict[str, list[int]] = {}
    for one in rounds:
        by_domain.setdefault(one.domain, []).append(one.num_committed)
    return Acceptance(
        draft_len,
        temperature,
        len(rounds),
        float(np.mean([one.num_committed for one in rounds])) if rounds else 1.0,
        tuple(r / n for r, n in zip(right, reached, strict=True) if n),
        {domain: float(np.mean(lens)) for domain, lens in sorted(by_domain.items())},
    )


def _recording(answer: TargetAnswer) -> Recording:
    sampling = SamplingParams(max_tokens=len(answer.answer_token_ids), temperature=answer.temperature, seed=answer.seed)
    return Recording(answer.name, answer.domain, answer.prompt_token_ids, answer.answer_token_ids, sampling)


def standardisation(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each dimension, fp32, over the rows of all tensors."""
    num = sum(len(part) for part in features)
    mean = torch.stack([part.double().sum(0) for part in features]).sum(0) / num
    squares = torch.stack([part.double().square().sum(0) for part in features]).sum(0) / num
    return mean.float(), (squares - mean.square()).clamp_min(1e-6).sqrt().float()
