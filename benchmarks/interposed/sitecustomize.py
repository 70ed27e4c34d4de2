"""Python imports this module at its start in every process of a server whose ``PYTHONPATH`` begins with this folder.

- ``time.time`` and ``time.time_ns`` differ from the wall clock by the seconds in a file (a native double).
- Outrider's gRPC links to this machine go through a proxy: for port P they dial 127.x.y.1, whose x and y are the bytes of P.
"""

import importlib.util
import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "OUTRIDER_INTERPOSED"  # PORT:FILE, of the proxy and of the clock's offset
_LOOPBACK = "127.0.0.1:"
_DIALS = "cluster.transport."  # modules whose links are redirected


def shift_clock(file: str) -> None:
    with open(file, "rb") as opened:
        offset = mmap.mmap(opened.fileno(), 8, prot=mmap.PROT_READ)
    real_time, real_time_ns = time.time, time.time_ns

    def offset_s() -> float:
        return float(struct.unpack("d", offset)[0])

    time.time = lambda: real_time() + offset_s()
    time.time_ns = lambda: real_time_ns() + int(offset_s() * 1e9)


def through_proxy(peer: str, proxy_port: int) -> str:
    """The address to dial instead of HOST:PORT, unless it is of another machine."""
    if not peer.startswith(_LOOPBACK):
        return peer
    high, low = divmod(int(peer.removeprefix(_LOOPBACK)), 256)
    return f"127.{high}.{low}.1:{proxy_port}"


class _Redirects(MetaPathFinder):
    """Wraps gRPC's channels as soon as a process imports it: an import at the start would slow every process down."""

    def __init__(self, proxy_port: int) -> None:
        self._proxy_port = proxy_port

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "grpc":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _wrap(self, grpc: Any) -> None:
        dial = grpc.insecure_channel

        def insecure_channel(target: str, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return dial(through_proxy(target, self._proxy_port) if caller.startswith(_DIALS) else target, *args, **options)

        grpc.insecure_channel = insecure_channel


if VARIABLE in os.environ:
    _port, _, _file = os.environ[VARIABLE].partition(":")
    shift_clock(_file)
    sys.meta_path.insert(0, _Redirects(int(_port)))
