"""Disturbs the network between a server's processes and the wall clock of their Python code."""

import os
import struct
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.interposed import sitecustomize
from benchmarks.link_proxy import LinkProxy


class Interposer(AbstractContextManager["Interposer"]):
    """``environment``: that of a server whose gRPC links and clock are to be disturbed."""

    def __init__(self, folder: Path) -> None:
        self.links = LinkProxy()
        self._offset_file = folder / "clock-offset"
        self.set_clock(0.0)

    @property
    def environment(self) -> dict[str, str]:
        folders = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, folders))
        return os.environ | {"PYTHONPATH": path, sitecustomize.VARIABLE: f"{self.links.port}:{self._offset_file}"}

    def set_clock(self, offset_s: float) -> None:
        """The wall clock jumps to the true time plus ``offset_s``."""
        mode = "r+b" if self._offset_file.exists() else "wb"  # in place: processes have mapped it
        with self._offset_file.open(mode) as file:
            file.write(struct.pack("d", offset_s))

    def __enter__(self) -> "Interposer":
        self.links.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.links.__exit__()
