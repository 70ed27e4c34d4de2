"""The model card of a trained drafter (what it is, its training data, its acceptance), and its figures as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.models.prepare import CATALOGUE
from training.confidences import DIAGRAM
from training.corpus import TargetAnswer
from training.evaluation import Acceptance
from training.recipe import TrainOptions

CARD, FIGURES = "README.md", "evaluation.json"

_KINDS = {
    "dspark": "a block drafter on the target's hidden states (DSpark)",
    "layers": "a few layers of the target, autoregressive",
    "table": "a table of the target's continuations of the last few tokens",
}
_DISTILLED = "Distilled: 0.1 cross entropy + 0.9 total variation, which replaces KL divergence over the first 30%"
_STORED = "Weights are a moving average, stored as int8 with a scale per row."


@dataclass(frozen=True, slots=True)
class CardData:
    options: TrainOptions
    target: str
    learned: Sequence[TargetAnswer]
    held_out: Sequence[TargetAnswer]
    trained: Sequence[Acceptance]
    untrained: Sequence[Acceptance]
    recipe: dict[str, Any]
    confidences: Mapping[str, float]  # of ``training.confidences.calibrate``; empty without calibration


def write_card(folder: Path, data: CardData) -> None:
    figures: dict[str, Any] = {
        "trained": [asdict(a) for a in data.trained],
        "untrained": [asdict(a) for a in data.untrained],
        "confidences": dict(data.confidences),
    }
    (folder / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    confidences = [_confidences(data)] if data.confidences else []
    sections = [_what(data), _figures(data), *confidences, _training(data), _data(data), _limits(data)]
    (folder / CARD).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _what(data: CardData) -> str:
    name, kind = data.options.out.name, data.options.drafter
    return (
        f"# {name}: a drafter for {data.target}\n\n"
        f"It is {_KINDS[kind]}, trained by `outrider train` on the target's own answers. It proposes tokens that the target "
        "verifies, so it changes the speed of answers and never their content. It works with this target only.\n\n"
        f"```yaml\ndrafters:\n  - name: {name}\n    options: {{kind: {kind}, path: ./{name}}}\n```\n\n"
        "`path` is this folder, here relative to its parent; a bare name would select a shipped drafter first."
    )


def _figures(data: CardData) -> str:
    before_training = "with random weights" if data.options.begin_with is None else "before"
    lines = [
        "## Figures",
        "",
        f"On {len(data.held_out)} answers to {len({a.key for a in data.held_out})} held-out prompts. The accepted "
        "length includes the bonus token; acceptance is per position, given that those before were right.",
        "",
        f"| temperature | draft tokens | accepted length | {before_training} | acceptance by position |",
        "|---:|---:|---:|---:|---|",
    ]
    untrained = {(a.temperature, a.draft_len): f"{a.accepted_len:.2f}" for a in data.untrained}
    for one in data.trained:
        before = untrained.get((one.temperature, one.draft_len), "")
        by_position = " ".join(f"{share:.2f}" for share in one.by_position)
        lines.append(f"| {one.temperature:g} | {one.draft_len} | {one.accepted_len:.2f} | {before} | {by_position} |")
    best = max(data.trained, key=lambda a: (a.draft_len, -a.temperature))
    by_domain = ", ".join(f"{domain} {length:.2f}" for domain, length in best.by_domain.items())
    lines += ["", f"By domain, {best.draft_len} draft tokens, temperature {best.temperature:g}: {by_domain}."]
    return "\n".join(lines)


def _confidences(data: CardData) -> str:
    figures = {name: f"{value:.3f}" for name, value in data.confidences.items()}
    shares = [
        f"| {title} | {figures.get(f'ece_{key}', '')} | {figures.get(f'auroc_{key}', '')} |"
        for key, title in (("before", "uncalibrated"), ("after", "calibrated"), ("isotonic", "isotonic maps"))
    ]
    lines = [
        "## Confidences",
        "",
        f"Of {data.confidences['records']:g} drafts at temperature {min(a.temperature for a in data.trained):g}, each half "
        "of the prompts judged with the fit on the other; `calibration.json` is fitted on both. Calibration error and "
        "AUROC refer to the survival of prefixes, and are means over the positions that enough drafts reach.",
        "",
        "| confidences | ECE | AUROC |",
        "|---|---:|---:|",
        *shares,
        "",
        f"![reliability]({DIAGRAM})",
    ]
    return "\n".join(lines)


def _training(data: CardData) -> str:
    options = data.options
    asked: dict[str, object] = {"seed": options.seed}
    if options.drafter != "table":
        asked["layers"] = options.num_layers
        if options.drafter == "dspark":
            asked |= {"block": options.block_size, "head": options.head}
        asked |= {"epochs": options.num_epochs, "learning rate": options.learning_rate}
    begin_with = options.begin_with
    start = f"the drafter {begin_with.name}" if begin_with else "a ridge regression of the target's final hidden states"
    how = {
        "dspark": f"{_DISTILLED}, and the confidence head on the expected acceptance (DSpark, equations 8 to 12). "
        f"Initialised from {start}. {_STORED}",
        "layers": f"{_DISTILLED}. Initialised from the target's own layers. {_STORED}",
        "table": "Counted, with shares shrunk towards those of the shorter context.",
    }[options.drafter]
    rows = [f"| {name} | {value} |" for name, value in (asked | data.recipe).items()]
    plots = "" if options.drafter == "table" else "\n\n![losses](losses.png)\n\n![acceptance](acceptance.png)"
    return "\n".join(["## Training", "", how, "", "| | |", "|---|---:|", *rows]) + plots


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
    return "## Data\n\n" + " ".join(sentences)


def _limits(data: CardData) -> str:
    origin = CATALOGUE[data.target].summary if data.target in CATALOGUE else data.target
    return (
        "## Licence and limits\n\n"
        f"Derived from {origin} and its answers: the target's licence applies. Acceptance is lower for subjects and "
        "languages that its training data lacks."
    )
