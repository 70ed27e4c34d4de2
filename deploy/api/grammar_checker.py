"""Checks the grammars of calls in a process of its own, so that no grammar harms the API or a target."""

import asyncio
import hashlib
import json
import logging
import math
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import Overloaded
from cluster.grammar import Grammar
from cluster.types import ModelInfo
from deploy.api.errors import bad_request
from router.fair_share import SharedLimit

logger = logging.getLogger(__name__)

CHECK_S = 5.0  # of one grammar
START_S = 60.0  # of the process, which imports torch
MAX_WAITING = 32  # calls
MAX_KNOWN = 1024  # grammars
REFUSED_S = 60.0  # a grammar whose check failed twice; the load of this machine may have caused it


@dataclass(frozen=True, slots=True)
class _Verdict:
    refusal: str | None  # None: it is not refused
    until_s: float  # monotonic; after it the grammar is checked again


class GrammarChecker:
    """One process checks one grammar at a time (`engine.grammar.checking`). It is started by the first grammar, and again
    after a check that took too long or took it down. It ends with this object.

    Args:
        folder: of the model.
        retry_after_s: for the error of too many calls.
    """

    def __init__(self, folder: Path, info: ModelInfo, retry_after_s: float, check_s: float = CHECK_S) -> None:
        eos_token_ids = map(str, info.eos_token_ids)
        self._command = [sys.executable, "-m", "engine.grammar.checking", str(folder), str(info.vocab_size), *eos_token_ids]
        self._retry_after_s = retry_after_s
        self._check_s = check_s
        self._process: subprocess.Popen[bytes] | None = None
        # A thread of its own: waiting checks must not take those that tokenize.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")
        self.waiting = SharedLimit(MAX_WAITING)
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()  # by digest

    async def check(self, field: str, grammar: Grammar, tenant: str = "") -> None:
        """Raises ApiError (400) naming ``field`` for a grammar that is refused; Overloaded: too many wait for a check, or it
        could not be made, or took too long or its process down for the first time. Cancelled, a check that waits is not
        made."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        verdict = self._verdict(digest)
        if verdict is None:
            self.waiting.hold(tenant, 1)
            try:
                if self.waiting.is_exceeded(tenant, least=1):
                    raise Overloaded("too many grammars wait for their check; try again later", self._retry_after_s)
                verdict = await asyncio.get_running_loop().run_in_executor(self._thread, self._learn, digest, grammar)
            finally:
                self.waiting.give_back(tenant, 1)
        if verdict.refusal is not None:
            raise bad_request(field, verdict.refusal)

    def _learn(self, digest: bytes, grammar: Grammar) -> _Verdict:
        """Runs in the one thread, so that no grammar is checked twice."""
        known = self._verdict(digest)
        if known is not None:
            return known
        try:
            return self._note(digest, self._refusal(grammar), math.inf)
        except TimeoutError:
            failure = f"takes more than {self._check_s:g} seconds to compile"
        except ConnectionError:
            failure = "cannot be compiled: it takes the compiler down"
        now_s = time.monotonic()
        if digest not in self._known:  # load of the machine may be the cause: only a second failure is a refusal
            self._note(digest, failure, now_s)
            raise Overloaded(f"the grammar {failure}; it is checked again at the next try", self._retry_after_s)
        return self._note(digest, failure, now_s + REFUSED_S)

    def _verdict(self, digest: bytes) -> _Verdict | None:
        """None: the grammar is to be checked."""
        known = self._known.get(digest)
        return None if known is None or time.monotonic() >= known.until_s else known

    def _note(self, digest: bytes, refusal: str | None, until_s: float) -> _Verdict:
        verdict = self._known[digest] = _Verdict(refusal, until_s)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return verdict

    def _refusal(self, grammar: Grammar) -> str | None:
        """Raises TimeoutError, ConnectionError: the check failed; Overloaded: its process does not start."""
        return _ask(self._running(), {"kind": grammar.kind, "source": grammar.source}, self._check_s)

    def _running(self) -> subprocess.Popen[bytes]:
        """Raises Overloaded: it does not start."""
        if self._process is None or self._process.poll() is not None:
            try:
                # What it logs goes where this process's log goes.
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                weakref.finalize(self, _end, self._process)
                _ask(self._process, None, START_S)
            except OSError as error:
                logger.error("the check of grammars did not start: %s", error)
                raise Overloaded("grammars cannot be checked now; try again later", self._retry_after_s) from error
        return self._process


def _ask(process: subprocess.Popen[bytes], question: dict[str, str] | None, timeout_s: float) -> str | None:
    """Ends the process and raises TimeoutError when it does not answer in time; ConnectionError: it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(timeout_s, expire)
    timer.start()
    try:
        if question is not None:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        answer: dict[str, str | None] = json.loads(process.stdout.readline())
    except (OSError, ValueError) as error:
        _end(process)
        raise (TimeoutError if expired.is_set() else ConnectionError)("the check of grammars has ended") from error
    finally:
        timer.cancel()
    return answer["error"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue  # of what was not flushed
