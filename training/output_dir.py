"""The output folder: replaced atomically, and only if it holds a drafter that training wrote."""

import shutil
from pathlib import Path

from cluster.errors import InvalidField
from drafters.shipped import kind_of

_FINISHED = "evaluation.json"  # in every finished drafter folder


def check_apart(out: Path, work: Path) -> None:
    """Raises InvalidField if one folder contains the other: ``out`` is replaced as a whole."""
    a, b = out.resolve(), work.resolve()
    if a.is_relative_to(b) or b.is_relative_to(a):
        raise InvalidField("out", str(out), f"must lie apart from the work folder {work}, as it is replaced as a whole")


def check_replaceable(out: Path) -> None:
    """Raises InvalidField if ``out`` is anything but absent, empty or a trained drafter."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise InvalidField("out", str(out), "must be a folder or not exist yet")
    content = list(out.iterdir())
    is_drafter = kind_of(out) is not None and (out / _FINISHED).is_file() and not any(path.is_dir() for path in content)
    if content and not is_drafter:
        raise InvalidField("out", str(out), "is not a trained drafter, so it is not replaced: name a new folder")


def replace_folder(part: Path, out: Path) -> None:
    """Renames ``part``, beside ``out``, to ``out``. The old folder is deleted last, so a kill loses neither."""
    check_replaceable(out)
    aside = out.with_name(f".{out.name}.old")
    if out.exists():
        shutil.rmtree(aside, ignore_errors=True)  # left by a killed run
        out.rename(aside)
    part.rename(out)
    shutil.rmtree(aside, ignore_errors=True)
