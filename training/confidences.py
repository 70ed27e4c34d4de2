"""Calibration of a trained drafter: fitted on held-out drafts, and judged on drafts that it was not fitted on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
