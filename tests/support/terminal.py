"""A real terminal of 80 columns for a command of its own process."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from select import select

from tests.support.waiting import DEADLINE_S

COLUMNS = 80

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """Output and input of an `outrider` process."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self._process = process
        self._screen = screen
        self._shown = b""

    @property
    def text(self) -> str:
        """All output without colours and cursor movements; rewritten lines appear again."""
        return _ESCAPE.sub("", self._shown.decode(errors="replace")).replace("\r\n", "\n").replace("\r", "\n")

    def await_text(self, words: str, times: int = 1) -> None:
        """Reads until ``words`` were shown ``times`` times."""
        end_s = time.monotonic() + DEADLINE_S
        while self.text.count(words) < times:
            ready, _, _ = select([self._screen], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"{words!r} was not shown {times} times within {DEADLINE_S:g} s: {self.text}"
            assert self._read(), f"the command ended: {self.text}"

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_end(self) -> int:
        """The exit code, after all output was read."""
        while self._read():
            pass
        return self._process.wait(DEADLINE_S)

    def _read(self) -> bool:
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self._shown += piece
        return bool(piece)


@contextmanager
def on_terminal(*arguments: str) -> Iterator[Terminal]:
    """``outrider ARGUMENTS``, killed at the end if it still runs."""
    screen, far_end = pty.openpty()
    fcntl.ioctl(far_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *arguments],
        stdin=far_end,
        stdout=far_end,
        stderr=far_end,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(far_end)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
