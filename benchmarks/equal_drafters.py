"""EAGLE-3, DFlash and DSpark of one budget: trained from the same answers of the target, with as many layers, tokens in the
vocabulary and epochs, as DSpark's table 1 compares them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks.report import Table
from cluster.config import DrafterConfig, HiddenStateOptions
from drafters.shipped import kind_of
from training.distributed import World
from training.pipeline import train
from training.recipe import TrainOptions
from training.work_folder import exclusive

FOLDER = Path("build/equal-drafters")
KINDS: tuple[Literal["eagle3", "dflash", "dspark"], ...] = ("eagle3", "dflash", "dspark")
NAMES = ("eagle3", "dflash", "equal-dspark")  # `dspark` is the shipped one, of a larger budget
# DSpark, table 1, Qwen3-4B: five layers, and 1.3 million prompts. Means of the benchmarks of each domain.
PAPER = {"eagle3": (4.56, 3.87, 2.40), "dflash": (4.80, 4.44, 2.95), "dspark": (5.57, 5.12, 3.49)}


def recipe(model: str, folder: Path | None = None, *, quick: bool = False) -> TrainOptions:
    """``quick``: of a tenth of the tokens, if none of the whole budget are there."""
    folder = folder or FOLDER / Path(model).name
    quick = quick and not is_trained(folder)
    folder = folder / "quick" if quick else folder
    out, work = folder / "dspark", folder / "work"
    return TrainOptions(model, "dspark", out, work, num_tokens=60_000, num_prompts=400, num_layers=1, quick=quick)


def is_trained(folder: Path) -> bool:
    return all(kind_of(folder / kind) == kind for kind in KINDS)


def trained(options: TrainOptions, tell: Callable[[str], None]) -> list[DrafterConfig]:
    """One drafter of each kind, beside ``options.out``. Those that are missing are trained."""
    found = []
    for kind, name in zip(KINDS, NAMES, strict=True):
        own = replace(options, drafter=kind, out=options.out.with_name(kind).absolute(), work=options.work.absolute())
        if kind_of(own.out) != kind:
            tell(f"training {name}")
            with exclusive(own.work):
                train(own, World(0, 1, torch.device("cpu")), _Quiet(tell))
        found.append(DrafterConfig(name=name, options=HiddenStateOptions(kind=kind, path=str(own.out))))
    return found


def paper_table() -> Table:
    rows = tuple((kind, *lens) for kind, lens in PAPER.items())
    return Table("DSpark's table 1, Qwen3-4B: accepted length, not measured here", ("drafter", "math", "code", "chat"), rows)


class _Quiet:
    """``training.pipeline.Reporter`` of steps alone."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def step(self, name: str, total: float) -> Callable[[float], None]:
        self._tell(f"{name} of {total:g}")
        return lambda done: None

    def say(self, line: str) -> None:
        self._tell(line)
