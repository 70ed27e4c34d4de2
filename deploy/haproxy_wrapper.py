"""The process that Ray Serve starts as its HAProxy: it starts HAProxy below it, and another one when that ends unasked.

Serve looks after its proxy every few seconds and replaces it after three failures, which took a minute.

- Serve must take this process for HAProxy: its process id is the one that the admin socket names. So this process listens
  there, passes commands on to HAProxy's own admin socket, and puts its own id into the answers. Each peer has a thread, so
  that one that is silent, or a HAProxy that hangs, keeps neither signals nor other peers waiting.
- It listens there only while its HAProxy answers, so that Serve's own checks see a proxy that cannot be started again.
- A reload starts a new wrapper with `-sf` and the ids of the old ones: HAProxy sends these SIGUSR1, SIGTTOU and SIGTTIN,
  which they pass on. A wrapper whose HAProxy was told to end ends with it.
- HAProxy ends with the wrapper, and the wrapper with Serve's process.
- A new HAProxy waits for one that is too busy to hand over its sockets: HAProxy gives up after a second, and Serve, after
  three tries, on the configuration.

Needs only the standard library, and the site packages of its interpreter are not read.
"""

import contextlib
import ctypes
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.haproxy import admin_socket, inner_admin, rewrite

PR_SET_PDEATHSIG = 1
PROMPT_S = 0.2  # an answer of a process that hands over its sockets in time
HANDOVER_S = 20.0
ADMIN_S = 6.0  # of one command: longer than Serve waits, which takes an early end for an answer
POLL_S = 0.05  # while HAProxy starts
START_S = 1.0  # of a question meanwhile, during which signals wait
MAX_PAUSE_S = 5.0
MAX_PEERS = 16  # at once; others are disconnected
STABLE_S = 1.0  # a HAProxy that answered, and ran for so long, is started again without a pause
# Passed on. After the first three HAProxy is meant to end.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PASSED_ON = (*ENDING, signal.SIGTTOU, signal.SIGTTIN)


def command(binary: str) -> list[str]:
    """The command line that takes the place of HAProxy's binary."""
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); from deploy.haproxy_wrapper import main; main()"
    )
    return [sys.executable, "-I", "-S", "-c", code, binary]


def main() -> None:
    binary, *arguments = sys.argv[1:]
    _end_with_parent()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # as cluster.cpu_scheduling, which this script cannot import
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if "-f" not in arguments:  # as `-v`
        os.execv(binary, [binary, *arguments])
    sys.exit(Wrapper(binary, arguments).run())


class Wrapper:
    """One HAProxy at a time, with the configuration that ``arguments`` name after ``-f``, as it is now."""

    def __init__(self, binary: str, arguments: Sequence[str]) -> None:
        self._binary = binary
        file = Path(arguments[arguments.index("-f") + 1])
        config = file.read_text()
        self._admin = admin_socket(config)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Of its own: a later reload overwrites Serve's.
        self._config = file.with_name(f"{file.stem}-{os.getpid()}.cfg")
        self._config.write_text(rewrite(config, file.parent, None if hard_limit == resource.RLIM_INFINITY else hard_limit))
        self._arguments = [str(self._config) if one == str(file) else one for one in arguments]
        self._inner = inner_admin(self._admin)
        self._listener: socket.socket | None = None  # at Serve's admin socket, while HAProxy answers
        self._peers = threading.BoundedSemaphore(MAX_PEERS)
        self._has_served = False
        self._is_ending = False

    def run(self) -> int:
        """Returns the exit code of a HAProxy that was told to end, or that did not start the first time."""
        woken = _signals()
        arguments = self._with_predecessor(self._arguments)
        num_failures = 0
        try:
            while True:
                started_s = time.monotonic()
                child = subprocess.Popen([self._binary, *arguments], preexec_fn=_end_with_parent)
                self._attend(child, woken)
                is_stable = self._listener is not None and time.monotonic() - started_s > STABLE_S
                self._close()
                if self._is_ending or not self._has_served:
                    return child.returncode if child.returncode >= 0 else 128 - child.returncode
                num_failures = 0 if is_stable else num_failures + 1
                pause_s = min(MAX_PAUSE_S, 0.1 * 2**num_failures) if num_failures > 1 else 0.0
                print(f"HAProxy ended with {child.returncode}: started again in {pause_s:g} s", file=sys.stderr, flush=True)
                if self._waits_to_end(woken, pause_s):
                    return 0
                arguments = _without_handover(self._arguments)
        finally:
            self._config.unlink(missing_ok=True)

    def _attend(self, child: subprocess.Popen[bytes], woken: socket.socket) -> None:
        """Answers Serve and passes signals on, until HAProxy has ended."""
        while child.poll() is None:
            listening = [] if self._listener is None else [self._listener]
            ready, _, _ = select.select([woken, *listening], [], [], None if listening else POLL_S)
            if woken in ready:
                for number in woken.recv(4096):
                    if number in PASSED_ON:
                        self._is_ending |= number in ENDING
                        child.send_signal(number)
            if self._listener is None:
                # A predecessor answers at the same socket until it hands it over.
                if f"\nPid: {child.pid}\n".encode() in _ask(self._inner, b"show info\n", START_S):
                    self._listen()
            elif self._listener in ready:
                self._accept(self._listener)

    def _listen(self) -> None:
        if self._is_ending:
            return
        listener = socket.socket(socket.AF_UNIX)
        own = f"{self._admin}.{os.getpid()}"
        listener.bind(own)
        listener.listen(16)
        os.replace(own, self._admin)  # from here on Serve reaches this process and not its predecessor
        self._listener, self._has_served = listener, True

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if self._peers.acquire(blocking=False):
            threading.Thread(target=self._relay, args=(connection,), daemon=True).start()
        else:
            connection.close()

    def _relay(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # of a peer that has left, or is too slow
                connection.settimeout(ADMIN_S)
                asked = b""
                while not asked.endswith(b"\n"):
                    piece = connection.recv(65536)
                    if not piece:
                        return
                    asked += piece
                answer = _ask(self._inner, asked, ADMIN_S)
                connection.sendall(re.sub(rb"(?m)^Pid: \d+$", b"Pid: %d" % os.getpid(), answer))
        finally:
            self._peers.release()

    def _waits_to_end(self, woken: socket.socket, pause_s: float) -> bool:
        """Whether a signal to end came within the pause."""
        end_s = time.monotonic() + pause_s
        while (left_s := end_s - time.monotonic()) > 0:
            ready, _, _ = select.select([woken], [], [], left_s)
            if ready and set(woken.recv(4096)) & set(ENDING):
                return True
        return False

    def _with_predecessor(self, arguments: Sequence[str]) -> list[str]:
        """Waits for the process that hands over its sockets, at its own admin socket; without ``-x`` if there is none."""
        if "-x" not in arguments:
            return list(arguments)
        if not wait_for_predecessor(self._inner):
            return _without(arguments, "-x", 1)
        return [
            str(self._inner) if before == "-x" else one for before, one in zip(("", *arguments), arguments, strict=False)
        ]


def wait_for_predecessor(admin: Path, prompt_s: float = PROMPT_S, deadline_s: float = HANDOVER_S) -> bool:
    """Returns when the process at an admin socket answers promptly, when none answers (False), or at the deadline."""
    end = time.monotonic() + deadline_s
    while (start := time.monotonic()) < end:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(end - start)
                connection.connect(str(admin))
                connection.sendall(b"show info\n")
                while connection.recv(4096):
                    pass
        except TimeoutError:
            return True
        except OSError:  # there is none, or it has ended
            return False
        if time.monotonic() - start < prompt_s:
            return True
    return True


def _ask(admin: Path, asked: bytes, within_s: float) -> bytes:
    """The answer at an admin socket, each piece of which comes within ``within_s``; empty: there was none in time."""
    pieces = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(within_s)
            connection.connect(str(admin))
            connection.sendall(asked)
            while piece := connection.recv(65536):
                pieces.append(piece)
    except OSError:
        return b""
    return b"".join(pieces)


def _without_handover(arguments: Sequence[str]) -> list[str]:
    """The arguments of a HAProxy that replaces a dead one, without its sockets (``-x``) and without its pid (``-sf``)."""
    return _without(_without(arguments, "-x", 1), "-sf", None)


def _without(arguments: Sequence[str], option: str, num_values: int | None) -> list[str]:
    """Without an option and its values; None: all up to the next option."""
    if option not in arguments:
        return list(arguments)
    first = arguments.index(option)
    end = first + 1
    while end < len(arguments) and (end - first <= num_values if num_values else not arguments[end].startswith("-")):
        end += 1
    return [*arguments[:first], *arguments[end:]]


def _signals() -> socket.socket:
    """A socket at which the numbers of signals arrive."""
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.detach())
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return woken


def _end_with_parent() -> None:
    """The kernel kills the process when its parent has ended; survives exec. Other systems lack it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
