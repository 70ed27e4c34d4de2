"""Where a drafter goes: nothing but an older drafter is ever replaced, and never by half of one."""

import shutil
from pathlib import Path

from cluster.errors import InvalidField
from drafters.shipped import kind_of

_FINISHED = "evaluation.json"  # in every folder of a drafter that training came to the end with


def check_apart(out: Path, work: Path) -> None:
    """Raises InvalidField where one folder lies in the other: ``out`` is replaced as a whole."""
    a, b = out.resolve(), work.resolve()
    if a.is_relative_to(b) or b.is_relative_to(a):
        raise InvalidField("out", str(out), f"must lie apart from the work folder {work}, for it is replaced as a whole")


def check_replaceable(out: Path) -> None:
    """Raises InvalidField where there is something else than a drafter that training left."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise InvalidField("out", str(out), "must be a folder, or not be there yet")
    inside = list(out.iterdir())
    is_drafter = kind_of(out) is not None and (out / _FINISHED).is_file() and not any(path.is_dir() for path in inside)
    if inside and not is_drafter:
        raise InvalidField(
            "out",
            str(out),
            "holds something else than a drafter, and would be replaced: name a new folder, one for each drafter",
        )


def replace_folder(part: Path, out: Path) -> None:
    """``part``, beside it, becomes ``out``. What was there is put aside first and deleted last, so that a kill in between
    loses neither."""
    check_replaceable(out)
    aside = out.with_name(f".{out.name}.old")
    if out.exists():
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed while it deleted
        out.rename(aside)
    part.rename(out)
    shutil.rmtree(aside, ignore_errors=True)
