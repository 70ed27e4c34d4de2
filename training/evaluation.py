"""Accepted length and acceptance of a saved drafter, opened as in serving, on held-out answers; and its calibration, fitted
on held-out drafts and judged on drafts that it was not fitted on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
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
from profiler.calibration import (
    FILE,
    Calibration,
    Records,
    TemperatureScaling,
    fit_by_grid,
    fit_temperatures,
    quality,
    save_calibration,
)
from profiler.reliability import plot_reliability
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


DIAGRAM = "reliability.png"  # of the lowest temperature


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    confidences: tuple[float, ...]  # uncalibrated
    num_accepted: int
    log_margins: tuple[float, ...] = ()  # as of TemperatureScaling; empty: unknown


Halves = tuple[Sequence[JudgedDraft], Sequence[JudgedDraft]]


def in_halves(answers: Sequence[TargetAnswer]) -> tuple[list[TargetAnswer], list[TargetAnswer]]:
    """Divides by prompt; the second half is empty if there is only one."""
    second = set(sorted({answer.key for answer in answers})[1::2])  # hashes, so in random order
    return [a for a in answers if a.key not in second], [a for a in answers if a.key in second]


def calibrate(drafts: Mapping[float, Halves], folder: Path) -> dict[str, float]:
    """Writes the calibration, fitted on both halves at each sampling temperature, and the reliability diagram of each.

    Returns ``records``, the number of drafts, and as far as these suffice ``ece_*``, ``auroc_*`` and ``brier_*`` of the
    original confidences (``before``), calibrated ones (``after``), those with margins (``margins``), and the paper's method
    (``grid``), each half judged with the other's fit; above the lowest temperature with ``.t<temperature>``.
    """
    figures: dict[str, float] = {}
    fits: dict[float, TemperatureScaling] = {}
    with_margins: dict[float, TemperatureScaling] = {}
    for temperature, halves in sorted(drafts.items()):
        judged = [*halves[0], *halves[1]]
        margins = [one.log_margins for one in judged]
        known = Records.of([(one.confidences, one.num_accepted) for one in judged], margins)
        records = replace(known, log_margins=None)
        in_first = np.arange(len(records)) < len(halves[0])
        predicted = {
            "before": np.asarray(np.cumprod(records.confidences, axis=1), np.float64),
            "after": _cross_validated(records, in_first, fit_temperatures),
            "grid": _cross_validated(records, in_first, fit_by_grid),
        }
        if any(margins):
            predicted["margins"] = _cross_validated(known, in_first, fit_temperatures)
            with_margins[temperature] = fit_temperatures(known)
        suffix = f".t{temperature:g}" if fits else ""
        figures["records" + suffix] = len(records)
        for name, survival in predicted.items():
            figures |= quality(survival, records).figures(name + suffix)
        reached = np.arange(records.max_len) < records.num_verified[:, None]
        outcomes = np.arange(records.max_len) < records.num_accepted[:, None]
        curves = [(name, survival[reached], outcomes[reached]) for name, survival in predicted.items()]
        title = f"survival of prefixes, all positions, temperature {temperature:g}"
        plot_reliability(curves, (folder / DIAGRAM).with_suffix(f"{suffix}.png"), title)
        fits[temperature] = fit_temperatures(records)
    save_calibration(Calibration(fits, with_margins), folder / FILE, **figures)
    return figures


def _cross_validated(
    records: Records, in_first: NDArray[np.bool_], fit: Callable[[Records], TemperatureScaling]
) -> NDArray[np.float64]:
    """(N, K) survival of each half by the fit on the other."""
    survival = np.empty(records.confidences.shape)
    for judged in (in_first, ~in_first):
        part = records.part(judged)
        survival[judged] = fit(records.part(~judged)).survival(part.confidences, part.log_margins)
    return survival
