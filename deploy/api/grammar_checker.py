"""Checks the grammars of calls in a process of its own, so that no grammar harms the API or a target."""

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.errors import Overloaded
from cluster.grammar import Grammar
from cluster.types import ModelInfo
from deploy.api.errors import bad_request

CHECK_S = 5.0  # of one grammar
START_S = 60.0  # of the process, which imports torch
MAX_WAITING = 32  # calls
MAX_KNOWN = 1024  # grammars


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
        self._num_waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by digest, why it is refused; "": it is not

    async def check(self, field: str, grammar: Grammar) -> None:
        """Raises ApiError (400) naming ``field`` for a grammar that is refused; Overloaded: too many wait for a check.
        Cancelled, a check that waits is not made."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        refusal = self._known.get(digest)
        if refusal is None:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} calls wait for the check of their grammars", self._retry_after_s)
            self._num_waiting += 1
            try:
                refusal = await asyncio.get_running_loop().run_in_executor(self._thread, self._learn, digest, grammar)
            finally:
                self._num_waiting -= 1
        if refusal:
            raise bad_request(field, refusal)

    def _learn(self, digest: bytes, grammar: Grammar) -> str:
        """Runs in the one thread, so that no grammar is checked twice."""
        known = self._known.get(digest)
        if known is not None:
            return known
        refusal = self._known[digest] = self._refusal(grammar) or ""
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return refusal

    def _refusal(self, grammar: Grammar) -> str | None:
        process = self._running()
        try:
            return _ask(process, {"kind": grammar.kind, "source": grammar.source}, self._check_s)
        except TimeoutError:
            return f"takes more than {self._check_s:g} seconds to compile"
        except ConnectionError:
            return "cannot be compiled: it takes the compiler down"

    def _running(self) -> subprocess.Popen[bytes]:
        """Raises TimeoutError, ConnectionError: it does not start."""
        if self._process is None or self._process.poll() is not None:
            # What it logs goes where this process's log goes.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, _end, self._process)
            _ask(self._process, None, START_S)
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
