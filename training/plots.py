"""The curves of a training run, as PNG beside the model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.distil import CurvePoint
from training.evaluation import Acceptance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (4.5, 3.6)  # inches, of one plot
_DPI = 110


def plot_losses(points: Sequence[CurvePoint], path: Path) -> None:
    """Losses by step; beside them the expected acceptance of the first draft token and the held-out accepted length."""
    figure, (left, right) = _figure(2)
    steps = [p.step for p in points]
    left.plot(steps, [p.loss for p in points], label="total")
    left.plot(steps, [p.cross_entropy for p in points], label="cross entropy")
    left.plot(steps, [p.match for p in points], label="total variation, L1")
    left.plot(steps, [p.confidence for p in points], label="confidence")
    _label(left, "loss", "step", "mean over the positions of a batch")
    right.plot(steps, [p.acceptance for p in points], label="expected acceptance, first token")
    heldout = [(p.step, p.heldout_accepted_len) for p in points if p.heldout_accepted_len is not None]
    if heldout:
        right.plot(*zip(*heldout, strict=True), marker="o", label="accepted length, held out")
    _label(right, "acceptance", "step", "share, and tokens per round")
    figure.savefig(path, dpi=_DPI)


def plot_acceptance(found: Sequence[Acceptance], path: Path) -> None:
    """Acceptance by position, for the longest drafts."""
    figure, (axes,) = _figure(1)
    longest = max(one.draft_len for one in found)
    for one in found:
        if one.draft_len == longest:
            positions = range(1, len(one.by_position) + 1)
            axes.plot(positions, one.by_position, marker="o", label=f"temperature {one.temperature:g}")
    axes.set_ylim(0.0, 1.0)
    _label(axes, "held-out answers", "position in the draft", "acceptance, given those before")
    figure.savefig(path, dpi=_DPI)


def _figure(num: int) -> "tuple[Figure, list[Axes]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0] * num, _SIZE[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, num, squeeze=False)[0])


def _label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
