"""Disturbs the network between a server's processes and the wall clock of their Python code."""

import os
import struct
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.interposed import sitecustomize
from benchmarks.link_proxy import LinkProxy


class WallClock:
    """Of the Python code of processes with ``environment``."""

    def __init__(self, file: Path, links_port: int = 0) -> None:
        """``links_port``: of a proxy for their gRPC links to this machine."""
        self._file = file
        folders = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, folders))
        self.environment = {"PYTHONPATH": path, sitecustomize.VARIABLE: f"{links_port}:{file}"}
        self.set(0.0)

    def set(self, offset_s: float) -> None:
        """It jumps to the true time plus ``offset_s``."""
        mode = "r+b" if self._file.exists() else "wb"  # in place: processes have mapped it
        with self._file.open(mode) as file:
            file.write(struct.pack("d", offset_s))


class Interposer(AbstractContextManager["Interposer"]):
    """``environment``: that of a server whose gRPC links and clock are to be disturbed."""

    def __init__(self, folder: Path) -> None:
        self.links = LinkProxy()
        self.clock = WallClock(folder / "clock-offset", self.links.port)
        self.environment = os.environ | self.clock.environment

    def __enter__(self) -> "Interposer":
        self.links.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.links.__exit__()
