"""The user's cache folder, and folders that no other user can enter: for sockets and compiled libraries."""

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """``$OUTRIDER_HOME``, else ``$XDG_CACHE_HOME/outrider``, else ``~/.cache/outrider``."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "outrider"


def make_private(folder: Path) -> None:
    """Makes the folder with mode 0700, or checks an existing one. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"the folder {folder} must belong to this user and admit no other (mode 0700)")
