"""Calibration of a trained drafter, judged on drafts that it was not fitted on, and written into its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drafters.replay import Round
from drafters.training.corpus import Answer
from profiler.calibration import FILE, Records, Scaling, fit_isotonic, fit_temperatures, quality, save_scaling
from profiler.reliability import plot_reliability

DIAGRAM = "reliability.png"
Halves = tuple[Sequence[Round], Sequence[Round]]


def in_halves(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Divided by prompt; the second is empty when there is only one."""
    second = set(sorted({answer.key for answer in answers})[1::2])  # fingerprints: their order means nothing
    return [a for a in answers if a.key not in second], [a for a in answers if a.key in second]


def calibrate(halves: Halves, folder: Path) -> dict[str, float]:
    """Writes calibration and reliability diagram.

    Each half is foreseen by what was fitted on the other, so nothing is judged by what it was fitted on; what is written is
    fitted on both. Returns the calibration error and the ranking (``profiler.calibration.Quality``) of the confidences as
    they are, of the calibrated ones, and of isotonic maps, as far as there were enough drafts to tell, and how many drafts
    there were.
    """
    records = Records.of([(one.confidences, one.num_accepted) for half in halves for one in half])
    in_first = np.arange(len(records)) < len(halves[0])
    foreseen = {
        "before": np.asarray(np.cumprod(records.confidences, axis=1), np.float64),
        "after": _crossed(records, in_first, fit_temperatures),
        "isotonic": _crossed(records, in_first, fit_isotonic),
    }
    figures: dict[str, float] = {"records": len(records)}
    for name, survival in foreseen.items():
        found = quality(survival, records)
        figures |= {} if found.ece is None else {f"ece_{name}": found.ece}
        figures |= {} if found.auroc is None else {f"auroc_{name}": found.auroc}
    save_scaling(fit_temperatures(records), folder / FILE, **figures)
    reached = np.arange(records.max_len) < records.num_verified[:, None]
    outcomes = np.arange(records.max_len) < records.num_accepted[:, None]
    curves = [(name, survival[reached], outcomes[reached]) for name, survival in foreseen.items()]
    plot_reliability(curves, folder / DIAGRAM, "survival of prefixes, all positions")
    return figures


def _crossed(records: Records, in_first: NDArray[np.bool_], fit: Callable[[Records], Scaling]) -> NDArray[np.float64]:
    """(N, K) survival of each half by what the other teaches."""
    survival = np.empty(records.confidences.shape)
    for judged in (in_first, ~in_first):
        survival[judged] = fit(_part(records, ~judged)).survival(records.confidences[judged])
    return survival


def _part(records: Records, which: NDArray[np.bool_]) -> Records:
    return Records(records.confidences[which], records.num_verified[which], records.num_accepted[which])
