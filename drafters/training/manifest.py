"""What a work folder holds: for which target, which steps are done and with which settings. It survives a kill."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import InvalidField

FILE = "manifest.json"
_FORMAT = 1


class WorkFolder:
    """Args:
        path: made if it is not there.
        identity: what everything in it depends on.
        writes: of several processes only one.

    Raises:
        InvalidField: the folder belongs to another target or seed, or does not say to which.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        path.mkdir(parents=True, exist_ok=True)
        self.identity = dict(identity)
        self._content = self._read(self.identity)

    def begin(self, step: str, settings: Mapping[str, Any]) -> bool:
        """Returns whether what the step left before was made with these settings, so that it can be gone on with."""
        entry = self._content["steps"].get(step)
        same = entry is not None and entry["settings"] == dict(settings)
        if not same:
            self._content["steps"][step] = {"settings": dict(settings), "done": False, "spent_s": 0.0, "figures": {}}
            self._write()
        return same

    def is_done(self, step: str) -> bool:
        return bool(self._content["steps"][step]["done"])

    def spent_s(self, step: str) -> float:
        """How long it was under way in earlier runs, as far as was noted."""
        return float(self._content["steps"][step]["spent_s"])

    def note_spent(self, step: str, seconds: float) -> None:
        self._content["steps"][step]["spent_s"] = seconds
        self._write()

    def finish(self, step: str, **figures: Any) -> None:
        self._content["steps"][step] |= {"done": True, "figures": figures}
        self._write()

    def _read(self, identity: dict[str, Any]) -> dict[str, Any]:
        file = self.path / FILE
        if not file.exists():
            return {"format": _FORMAT, "identity": identity, "steps": {}}
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        known = content.get("identity", {})
        missing = [key for key in identity if key not in known]
        if content.get("format") != _FORMAT or missing:
            reason = f"was begun by another version, which did not note its {', '.join(missing) or 'steps'} as this one does"
            raise InvalidField("work", str(self.path), f"{reason}: choose another folder")
        differing = [key for key, value in identity.items() if known[key] != value]
        if differing:
            reason = f"was begun with another {', '.join(differing)}"
            raise InvalidField("work", str(self.path), f"{reason}: choose another folder")
        return content

    def _write(self) -> None:
        if not self._writes:
            return
        partial = self.path / (FILE + ".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path / FILE)


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """One training run in a work folder at a time; the lock ends with the process.

    Raises:
        InvalidField: another one is under way.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidField("work", str(path), "another run is under way there: wait, or choose another") from None
        yield
