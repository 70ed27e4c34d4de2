"""The trained drafters that come with the program, in folders under ``assets/drafters``. No torch."""

import json
from pathlib import Path

from cluster.errors import ModelUnavailable

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "drafters"


def shipped_names() -> tuple[str, ...]:
    """Of the drafters that are there, ascending."""
    if not FOLDER.is_dir():
        return ()
    return tuple(sorted(path.name for path in FOLDER.iterdir() if kind_of(path) is not None))


def find_drafter(name_or_path: str) -> Path:
    """The folder or file of a trained drafter: a shipped one by its name, any other by its path.

    Raises:
        ModelUnavailable: there is none; names those that there are.
    """
    places = [FOLDER / name_or_path] if name_or_path == Path(name_or_path).name else []
    for path in (*places, Path(name_or_path).expanduser().absolute()):
        if path.exists():
            return path
    known = ", ".join(shipped_names()) or "none"
    raise ModelUnavailable(f"{name_or_path}: no folder of a trained drafter; shipped are: {known}; see `outrider train`")


def kind_of(folder: Path) -> str | None:
    """Which kind of drafter a folder holds: table, dspark or layers; None: no drafter."""
    if (folder / "table.npz").is_file():
        return "table"
    try:
        architecture = str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return "dspark" if "DSpark" in architecture else "layers"
