"""``outrider train``: options, progress bars and the table of results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from drafters.shipped import find_drafter
from engine.cpu_setup import configure_cpu
from training.distributed import join_world
from training.pipeline import Result, train
from training.recipe import TrainOptions
from training.work_folder import exclusive


class _Bars:
    """``training.pipeline.Reporter``: one progress bar per step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def step(self, name: str, total: float) -> Callable[[float], None]:
        task = self._progress.add_task(name, total=total)
        return lambda done: self._progress.update(task, completed=done)

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False)


def run(*, out: Path, work: Path | None, prompts: Sequence[Path] | None, begin_with: str | None, **fields: Any) -> None:
    """``fields``: of TrainOptions. Raises as ``training.pipeline.train``."""
    configure_cpu()
    out = out.expanduser().absolute()
    options = TrainOptions(
        out=out,
        work=(work or out.with_name(f"{out.name}-work")).expanduser().absolute(),
        prompts=tuple(prompts or ()),
        begin_with=None if begin_with is None else find_drafter(begin_with),
        **fields,
    )
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with join_world(options.device) as world:
        if not world.is_first:
            with Progress(disable=True) as silent:
                train(options, world, _Bars(silent))
            return
        with exclusive(options.work), Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            result = train(options, world, _Bars(progress))
    if result is not None:
        _show(result, console)
        print(result.folder)


def _show(result: Result, console: Console) -> None:
    table = Table("temperature", "draft tokens", "accepted length", "before", "by position", title="held-out answers")
    untrained = {(a.temperature, a.draft_len): f"{a.accepted_len:.2f}" for a in result.untrained}
    for one in result.trained:
        table.add_row(
            f"{one.temperature:g}",
            str(one.draft_len),
            f"{one.accepted_len:.2f}",
            untrained.get((one.temperature, one.draft_len), ""),
            " ".join(f"{share:.2f}" for share in one.by_position),
        )
    console.print(table)
