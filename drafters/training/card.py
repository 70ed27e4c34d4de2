"""The model card of a trained drafter: what it is, what it learned from, how good it is. And the same figures as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafters.training.confidences import DIAGRAM
from drafters.training.corpus import Answer
from drafters.training.evaluation import Acceptance
from drafters.training.recipe import TrainOptions
from engine.models.prepare import CATALOGUE

_DISTILLED = (
    "Distilled with the target frozen: 0.1 cross entropy + 0.9 total variation, which KL divergence turns into over the "
    "first 30%"
)
CARD, FIGURES = "README.md", "evaluation.json"


@dataclass(frozen=True, slots=True)
class CardData:
    options: TrainOptions
    target: str
    learned: Sequence[Answer]
    held_out: Sequence[Answer]
    trained: Sequence[Acceptance]
    untrained: Sequence[Acceptance]
    recipe: dict[str, Any]
    confidences: Mapping[str, float]  # as of ``drafters.training.confidences.calibrate``; empty without calibration


def write_card(folder: Path, data: CardData) -> None:
    figures: dict[str, Any] = {
        "trained": [asdict(a) for a in data.trained],
        "untrained": [asdict(a) for a in data.untrained],
        "confidences": dict(data.confidences),
    }
    (folder / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sections = [_what(data), _figures(data), _training(data), _data(data), _limits(data)]
    if data.confidences:
        sections.insert(2, _confidences(data))
    (folder / CARD).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _what(data: CardData) -> str:
    kind = {
        "dspark": "a block drafter on the target's hidden states (DSpark)",
        "layers": "a few layers of the target, autoregressive",
        "table": "a table of what the target tends to say after the last few tokens",
    }[data.options.drafter]
    return (
        f"# {data.options.out.name}: a drafter for {data.target}\n\n"
        f"It is {kind}, trained by `outrider train` on the target's own answers. It proposes tokens; the target verifies "
        "them, so it changes how fast answers come and never what they say. It works with this target alone.\n\n"
        "```yaml\ndrafters:\n"
        f"  - name: {data.options.out.name}\n"
        f"    options: {{kind: {data.options.drafter}, path: ./{data.options.out.name}}}\n```\n\n"
        "`path` is this folder, here as seen from the one that it lies in; a bare name means a shipped drafter first."
    )


def _figures(data: CardData) -> str:
    before_training = "with random weights" if data.options.begin_with is None else "before"
    lines = [
        "## Figures",
        "",
        f"On {len(data.held_out)} answers to {len({a.key for a in data.held_out})} prompts that it never saw. The accepted "
        "length counts the bonus token; acceptance is that of each position, given that those before were right.",
        "",
        f"| temperature | draft tokens | accepted length | {before_training} | acceptance by position |",
        "|---:|---:|---:|---:|---|",
    ]
    untrained = {(a.temperature, a.draft_len): a.accepted_len for a in data.untrained}
    for one in data.trained:
        before = untrained.get((one.temperature, one.draft_len))
        by_position = " ".join(f"{share:.2f}" for share in one.by_position)
        lines.append(
            f"| {one.temperature:g} | {one.draft_len} | {one.accepted_len:.2f} | "
            f"{'' if before is None else f'{before:.2f}'} | {by_position} |"
        )
    best = max(data.trained, key=lambda a: (a.draft_len, -a.temperature))
    by_domain = ", ".join(f"{domain} {length:.2f}" for domain, length in best.by_domain.items())
    lines += ["", f"By domain, {best.draft_len} draft tokens, temperature {best.temperature:g}: {by_domain}."]
    return "\n".join(lines)


def _confidences(data: CardData) -> str:
    shares = [
        f"| {title} | {_figure(data.confidences.get(f'ece_{key}'))} | {_figure(data.confidences.get(f'auroc_{key}'))} |"
        for key, title in (("before", "as they are"), ("after", "calibrated"), ("isotonic", "by isotonic maps"))
    ]
    lines = [
        "## Confidences",
        "",
        f"Of {data.confidences['records']:g} drafts at temperature {min(a.temperature for a in data.trained):g}, each half "
        "of the prompts foreseen by what was fitted on the other; `calibration.json` is fitted on both. Calibration error "
        "and AUROC are of the survival of prefixes, and means over the positions that enough drafts reach.",
        "",
        "| confidences | ECE | AUROC |",
        "|---|---:|---:|",
        *shares,
        "",
        f"![reliability]({DIAGRAM})",
    ]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _training(data: CardData) -> str:
    options = data.options
    asked: dict[str, object] = {
        "seed": options.seed,
        "layers": options.num_layers,
        "block": options.block_size,
        "epochs": options.num_epochs,
        "learning rate": options.learning_rate,
    }
    if options.drafter == "table":
        asked = {"seed": options.seed}
    if options.drafter == "layers":
        del asked["block"]
    if options.drafter == "dspark":
        asked["head"] = options.head
    rows = [f"| {name} | {value} |" for name, value in (asked | data.recipe).items()]
    beginning = "as a ridge regression of the target's final hidden states"
    if options.begin_with is not None:
        beginning = f"as the drafter {options.begin_with.name}"
    how = {
        "dspark": f"{_DISTILLED}, and the confidence head on the expected acceptance (DSpark, equations 8 to 12). It "
        f"began {beginning}. Weights are a moving average, stored as int8 "
        "with a scale per row.",
        "layers": f"{_DISTILLED}. It began with the target's own layers. Weights are a moving average, stored as int8 "
        "with a scale per row.",
        "table": "Counted, with shares shrunk towards those of the shorter context.",
    }[options.drafter]
    plots = "" if options.drafter == "table" else "\n\n![losses](losses.png)\n\n![acceptance](acceptance.png)"
    return "\n".join(["## Training", "", how, "", "| | |", "|---|---:|", *rows]) + plots


def _data(data: CardData) -> str:
    num_tokens = sum(len(a.answer_token_ids) for a in data.learned)
    domains = Counter(a.domain for a in data.learned)
    counted = ", ".join(f"{domain} {num}" for domain, num in sorted(domains.items()))
    return (
        "## Data\n\n"
        f"{len(data.learned)} answers by the target, {num_tokens} tokens, at temperatures "
        f"{', '.join(f'{t:g}' for t in sorted({a.temperature for a in data.learned}))}. "
        f"{_origins(data)} Answers by domain: {counted}."
    )


def _origins(data: CardData) -> str:
    options = data.options
    said = ["Prompts written by the target itself."] if options.num_prompts else []
    if options.prompts:
        files = ", ".join(path.name for path in options.prompts)
        said.append(f"Prompts of given files: {files}; their licences are for whoever gave them to state.")
    if num_composed := len({a.key for a in data.learned if a.sources}):
        kinds = "translations, questions about passages, problems in other languages"
        said.append(f"{num_composed} prompts composed of others: {kinds}.")
    if options.data_folder is not None:
        said.append("Prompts of the evaluation sets were left out.")
    return " ".join(said)


def _limits(data: CardData) -> str:
    known = CATALOGUE.get(data.target)
    origin = data.target if known is None else known.summary
    return (
        "## Licence and limits\n\n"
        f"Derived from {origin} and its answers: the target's licence holds. Answers in subjects and languages that "
        "are not among its data are drafted less well."
    )
