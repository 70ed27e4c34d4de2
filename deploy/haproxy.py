"""A wrapper round HAProxy, which Serve starts in its place: `python haproxy.py BINARY PORTS ARGUMENTS...`.

It lacks two settings. HAProxy outlives the actor that starts it, so when Ray dies at once it would stay for ever; and the
frontends of its own statistics listen at all interfaces, on a laptop's deployment too. Needs only the standard library.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def bind_to_loopback(config: str, ports: list[int]) -> str:
    """The frontends at these ports, moved from all interfaces to loopback."""
    wanted = "|".join(map(str, ports))
    return re.sub(rf"(?m)^(\s*bind )\*?:({wanted})$", r"\g<1>127.0.0.1:\2", config)


def main(binary: str, ports: str, arguments: list[str]) -> None:
    if sys.platform == "linux":  # others have no such call
        # Kept over exec: the kernel kills HAProxy when the process that started it is gone.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        file.write_text(bind_to_loopback(file.read_text(), [int(port) for port in ports.split(",")]))
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
