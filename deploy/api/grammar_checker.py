"""Checks the grammars of calls in a process of its own, so that none harms the API or a target. Tenants take turns."""

import asyncio
import hashlib
import json
import logging
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGALRM, SIGKILL, SIGXCPU, Signals
from typing import Any

from cluster.errors import Overloaded
from cluster.sampling_params import Grammar
from cluster.types import ModelInfo
from deploy.api.admission import Admission
from deploy.api.errors import ApiError, bad_request
from deploy.api.settings import ApiSettings
from deploy.api.tenants import Tenant

MAX_KNOWN = 1024  # grammars
logger = logging.getLogger(__name__)

NUM_AT_ONCE = 2  # checks


@dataclass(frozen=True, slots=True)
class CheckLimits:
    cpu_s: int = 5  # of one check
    hang_s: float = 60.0  # of one check, whatever the load of the machine
    start_s: float = 60.0  # of the process, which imports torch
    max_waiting: int = 32  # grammars

    @property
    def answer_s(self) -> float:
        """A process that has not answered by then has ended or hangs itself."""
        return self.hang_s + 10.0


@dataclass(frozen=True, slots=True)
class Checked:
    """``refusal``: why the grammar is refused, None: it is not. ``cpu_s``: processor time that the check took."""

    refusal: str | None
    cpu_s: float


class GrammarProcess:
    """Starts with the first check, again when it has ended, and ends with this object. Thread-safe.

    Args:
        folder: of the model.
        retry_after_s: for the error of a check that could not be made.
    """

    def __init__(self, folder: Path, info: ModelInfo, retry_after_s: float, limits: CheckLimits = CheckLimits()) -> None:
        times = (str(limits.cpu_s), str(limits.hang_s))
        arguments = (str(folder), str(info.vocab_size), *times, *map(str, info.eos_token_ids))
        self._limits = limits
        self._command: Sequence[str] = (sys.executable, "-m", "engine.grammar.checking", *arguments)
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalize: Callable[[], object] = lambda: None  # ends the process and its lines
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()  # lines of the process that runs

    def check(self, grammar: Grammar) -> Checked:
        """Waits for the check. Raises Overloaded: it could not be made, for a reason that is not the grammar's."""
        line, free, end = self._line()
        try:
            line.settimeout(self._limits.answer_s)
            line.sendall(json.dumps({"kind": grammar.kind, "source": grammar.source}).encode() + b"\n")
            answer = _read(line)
        except (OSError, ValueError) as error:
            end()  # of the process that this check was made by, which may have a successor
            logger.warning("the check of grammars has ended: %s", error)
            raise self._failed("the check of the grammar has failed") from error
        free.put(line)
        return self._checked(answer)

    def _checked(self, answer: dict[str, Any]) -> Checked:
        """The process that makes one check is ended by a signal at its limits, and by SIGKILL where memory runs out."""
        ended = answer["ended"]
        if ended is None:
            return Checked(answer["error"], answer["cpu_s"])
        if ended == SIGXCPU:
            return Checked(f"takes more than {self._limits.cpu_s} seconds of processor time to compile", answer["cpu_s"])
        if ended in (SIGALRM, SIGKILL):
            raise self._failed(f"the check of the grammar was ended by {Signals(ended).name}")
        return Checked("cannot be compiled: it takes the compiler down", answer["cpu_s"])

    def _line(self) -> tuple[socket.socket, "queue.SimpleQueue[socket.socket]", Callable[[], object]]:
        """A line of the running process that no other thread uses, where it returns to, and what ends the process. Raises
        Overloaded: it does not start."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                try:
                    self._start()
                except (OSError, ValueError) as error:
                    self._finalize()
                    logger.error("the check of grammars did not start: %s", error)
                    raise self._failed("grammars cannot be checked now") from error
            return self._free.get(), self._free, self._finalize

    def _start(self) -> None:
        self._finalize()
        pairs = [socket.socketpair() for _ in range(NUM_AT_ONCE)]
        theirs = [one.fileno() for _, one in pairs]
        self._free = queue.SimpleQueue()
        try:
            # What it logs goes where this process's log goes.
            command = (*self._command, *(f"--line={number}" for number in theirs))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs)
        finally:
            for _, one in pairs:
                one.close()
        self._finalize = weakref.finalize(self, _end, self._process, [ours for ours, _ in pairs])
        for ours, _ in pairs:
            ours.settimeout(self._limits.start_s)
            _read(ours)
            self._free.put(ours)

    def _failed(self, what: str) -> Overloaded:
        return Overloaded(f"{what}; try again later", self._retry_after_s)


def _read(line: socket.socket) -> dict[str, Any]:
    """Raises OSError, ValueError: the other end has ended, or does not answer."""
    received = bytearray()
    while not received.endswith(b"\n"):
        part = line.recv(2**16)
        if not part:
            raise ConnectionError("it has ended")
        received += part
    answer: dict[str, Any] = json.loads(received)
    return answer


def _end(process: subprocess.Popen[bytes], lines: Sequence[socket.socket]) -> None:
    process.kill()
    process.wait()
    for line in lines:
        line.close()


@dataclass(slots=True)
class _Check:
    """Of one grammar, for all calls that wait for it."""

    task: "asyncio.Task[Checked | Exception] | None" = None
    num_calls: int = 0
    has_begun: bool = False


class GrammarChecker:
    """Checks NUM_AT_ONCE grammars at once, but one of each tenant where there are several. Next is the tenant whose checks
    took the least processor time. Verdicts are kept; a check that fails for another reason refuses no grammar.

    Args:
        folder: of the model.
        retry_after_s: for the error of too many grammars, and of a check that could not be made.
    """

    def __init__(self, folder: Path, info: ModelInfo, retry_after_s: float, limits: CheckLimits = CheckLimits()) -> None:
        self.process = GrammarProcess(folder, info, retry_after_s, limits)
        # Threads of its own: checks must not take those that tokenize.
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="grammar-checks")
        queue_limits = ApiSettings(max_concurrent=NUM_AT_ONCE, max_queued=limits.max_waiting, retry_after_s=retry_after_s)
        self._turns = Admission(queue_limits, "grammars")  # charged by the millisecond
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # refusals, by digest
        self._checks: dict[bytes, _Check] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._checks or self._turns.num_queued or self._turns.num_running)

    def set_tenants(self, names: Iterable[str]) -> None:
        known = {name: Tenant(name, max_concurrent=1) for name in names}
        self._turns.set_tenants(known if len(known) > 1 else {})

    async def check(self, field: str, grammar: Grammar, tenant: str = "") -> None:
        """Raises ApiError: 400 naming ``field`` for a grammar that is refused, 429 if too many wait; Overloaded: the check
        could not be made. Cancelled, a check that waits, and for which no other call does, is not made."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        refusal = self._known[digest] if digest in self._known else await self._learn(digest, grammar, tenant)
        if refusal is not None:
            raise bad_request(field, refusal)

    async def _learn(self, digest: bytes, grammar: Grammar, tenant: str) -> str | None:
        check = self._checks.get(digest)
        if check is None:
            check = self._checks[digest] = _Check()
            check.task = asyncio.create_task(self._make(check, digest, grammar, tenant))
        assert check.task is not None
        check.num_calls += 1
        try:
            result = await asyncio.shield(check.task)
        finally:
            check.num_calls -= 1
            if not check.num_calls and not check.has_begun:
                check.task.cancel()
                self._forget(check, digest)
        if isinstance(result, Exception):
            raise result
        return result.refusal

    async def _make(self, check: _Check, digest: bytes, grammar: Grammar, tenant: str) -> Checked | Exception:
        try:
            async with self._turns.admitted(1, tenant):
                check.has_begun = True
                result = await asyncio.get_running_loop().run_in_executor(self._threads, self.process.check, grammar)
                self._turns.charge(tenant, round(1e3 * result.cpu_s))
        except (Overloaded, ApiError) as error:
            return error
        finally:
            self._forget(check, digest)
        self._known[digest] = result.refusal
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return result

    def _forget(self, check: _Check, digest: bytes) -> None:
        if self._checks.get(digest) is check:
            del self._checks[digest]
