"""The model card of a trained drafter (what it is, its training data, its acceptance), and its figures as JSON.
It also draws the plots of losses and acceptance."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from cluster.config import HIDDEN_STATE_FORMS
from engine.models.prepare import CATALOGUE
from training.corpus import TargetAnswer
from training.distil import CurvePoint
from training.evaluation import DIAGRAM, Acceptance
from training.recipe import TrainOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CARD, FIGURES = "README.md", "evaluation.json"
_TEMPLATE = Path(__file__).with_name("card_template.md")

_KINDS: dict[str, str] = {
    **{kind: form.what for kind, form in HIDDEN_STATE_FORMS.items()},
    "layers": "a few layers of the target, autoregressive",
    "table": "a table of the target's continuations of the last few tokens",
}
_DISTILLED = "Distilled: 0.1 cross entropy + 0.9 total variation, which replaces KL divergence over the first 30%"
_STORED = "Weights are a moving average, stored as int8 with a scale per row."
_QUALITY = ("ece", "auroc", "brier")
_CALIBRATIONS = {
    "before": "uncalibrated",
    "after": "calibrated",
    "margins": "calibrated, with margins",
    "grid": "calibrated as in the paper",
}
_SIZE = (4.5, 3.6)  # inches, of one plot
_DPI = 110


@dataclass(frozen=True, slots=True)
class CardData:
    options: TrainOptions
    target: str
    learned: Sequence[TargetAnswer]
    held_out: Sequence[TargetAnswer]
    trained: Sequence[Acceptance]
    untrained: Sequence[Acceptance]
    recipe: dict[str, Any]
    confidences: Mapping[str, float]  # of ``training.evaluation.calibrate``; empty without calibration


def write_card(folder: Path, data: CardData) -> None:
    figures: dict[str, Any] = {
        "trained": [asdict(a) for a in data.trained],
        "untrained": [asdict(a) for a in data.untrained],
        "confidences": dict(data.confidences),
    }
    (folder / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    options, untrained = data.options, {(a.temperature, a.draft_len): f"{a.accepted_len:.2f}" for a in data.untrained}
    rows = []
    for one in data.trained:
        before = untrained.get((one.temperature, one.draft_len), "")
        by_position = " ".join(f"{share:.2f}" for share in one.by_position)
        rows.append(f"| {one.temperature:g} | {one.draft_len} | {one.accepted_len:.2f} | {before} | {by_position} |")
    best = max(data.trained, key=lambda a: (a.draft_len, -a.temperature))
    text = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=options.out.name,
        kind=options.drafter,
        target=data.target,
        what=_KINDS[options.drafter],
        num_answers=len(data.held_out),
        num_prompts=len({a.key for a in data.held_out}),
        before="with random weights" if options.begin_with is None else "before",
        figures="\n".join(rows),
        draft_len=best.draft_len,
        temperature=f"{best.temperature:g}",
        by_domain=", ".join(f"{domain} {length:.2f}" for domain, length in best.by_domain.items()),
        confidences=_confidences(data) if data.confidences else "",
        how=_how(options),
        settings="\n".join(f"| {name} | {value} |" for name, value in (_settings(options) | data.recipe).items()),
        plots="" if options.drafter == "table" else "\n\n![losses](losses.png)\n\n![acceptance](acceptance.png)",
        data=_data(data),
        origin=CATALOGUE[data.target].summary if data.target in CATALOGUE else data.target,
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def _confidences(data: CardData) -> str:
    figures = {name: f"{value:.3f}" for name, value in data.confidences.items()}
    lowest, *others = sorted({a.temperature for a in data.trained})
    shares = [
        f"| {temperature:g} | {title} | " + " | ".join(figures.get(f"{name}_{key}{suffix}", "") for name in _QUALITY) + " |"
        for temperature, suffix in [(lowest, ""), *((t, f".t{t:g}") for t in others)]
        for key, title in _CALIBRATIONS.items()
        if f"ece_{key}{suffix}" in figures
    ]
    lines = [
        "## Confidences",
        "",
        f"Of {data.confidences['records']:g} drafts at temperature {lowest:g}, each half of the prompts judged with the fit "
        "on the other; `calibration.json` is fitted on both. Right is what equals the target's choice under the same noise. "
        "Figures refer to the survival of prefixes, and are means over the positions that enough drafts reach. A margin is "
        "the score by which a token was chosen, noise included.",
        "",
        "| temperature | confidences | ECE | AUROC | Brier score |",
        "|---:|---|---:|---:|---:|",
        *shares,
        "",
        f"![reliability]({DIAGRAM})",
        "",
        "",
    ]
    return "\n".join(lines)


def _settings(options: TrainOptions) -> dict[str, Any]:
    if options.drafter == "table":
        return {"seed": options.seed}
    shape = {"block": options.block_size, "head": options.head} if options.form and options.form.has_heads else {}
    rates = {"epochs": options.num_epochs, "learning rate": options.learning_rate}
    return {"seed": options.seed, "layers": options.num_layers, **shape, **rates}


def _how(options: TrainOptions) -> str:
    begin_with = options.begin_with
    start = f"the drafter {begin_with.name}" if begin_with else "a ridge regression of the target's final hidden states"
    if (form := options.form) is None:
        return {
            "layers": f"{_DISTILLED}. Initialised from the target's own layers. {_STORED}",
            "table": "Counted, with shares shrunk towards those of the shorter context.",
        }[options.drafter]
    if not form.drafts_blocks:
        return f"{_DISTILLED}, over its own states. Initialised from {start}. Weights are a moving average, in bfloat16."
    heads = ", and the confidence head on the expected acceptance (DSpark, equations 8 to 12)" * form.has_heads
    return f"{_DISTILLED}{heads}. Initialised from {start}. {_STORED}"


def _data(data: CardData) -> str:
    options = data.options
    num_tokens = sum(len(a.answer_token_ids) for a in data.learned)
    temperatures = ", ".join(f"{t:g}" for t in sorted({a.temperature for a in data.learned}))
    sentences = [f"{len(data.learned)} answers by the target, {num_tokens} tokens, at temperatures {temperatures}."]
    if options.num_prompts:
        sentences.append("Prompts written by the target itself.")
    if options.prompts:
        files = ", ".join(path.name for path in options.prompts)
        sentences.append(f"Prompts from given files: {files}; their licences must be stated by whoever provided them.")
    if num_composed := len({a.key for a in data.learned if a.sources}):
        kinds = "translations, questions about passages, problems in other languages"
        sentences.append(f"{num_composed} prompts composed of others: {kinds}.")
    if options.data_folder is not None:
        sentences.append("Prompts of the evaluation sets were left out.")
    domains = Counter(a.domain for a in data.learned)
    sentences.append(f"Answers by domain: {', '.join(f'{domain} {num}' for domain, num in sorted(domains.items()))}.")
    return " ".join(sentences)


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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0] * num, _SIZE[1]), layout="constrained")
    return figure, list(figure.subplots(1, num, squeeze=False)[0])


def _label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
