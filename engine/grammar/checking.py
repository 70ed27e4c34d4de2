"""Checks grammars in a process of its own, which forks for each check, so that limits can end one.

On each of several sockets it reads one JSON object a line, {"kind", "source"}, and writes {"error": null or why the grammar
is refused, "ended": null or the signal or status with which the check has ended, "cpu_s"}. A grammar is refused that is
malformed, that cannot be enforced, that no output seems to match, or whose masks take too long.
"""

import json
import os
import random
import resource
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from cluster.errors import InvalidField
from cluster.sampling_params import Grammar, GrammarKind
from engine.grammar.compiling import CompiledGrammar, Grammars
from engine.grammar.tag_rules import schemas_of
from engine.grammar.vocabulary import GrammarVocabulary

MAX_MASK_S = 0.05  # of the slowest row; a round waits for the masks of all its rows
MAX_END_S = 0.5  # to find an end; the second half of an output is searched for ends at each row
SAMPLE_BYTES = 256
END_EVERY_BYTES = 64  # of the sample
DATA_BYTES = 2 * 2**30  # of this process beyond what it starts with


def refusal(grammars: Grammars, grammar: Grammar) -> str | None:
    """Why a grammar is refused; None: it is not."""
    try:
        compiled = grammars.compile(grammar)
    except InvalidField as error:
        return error.reason
    return _fault(grammars, compiled) or _slowness(compiled)


def _fault(grammars: Grammars, compiled: CompiledGrammar) -> str | None:
    """Why outputs of a JSON schema, or of one in a structural tag, may be endless."""
    source = compiled.grammar.source
    match compiled.grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return None if compiled.shortest_len is not None else "no output was found that matches it and ends"
        case GrammarKind.STRUCTURAL_TAG:
            for place, schema in schemas_of(source):
                fault = _fault(grammars, grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, schema)))
                if fault is not None:
                    return place + fault
    return None


def _slowness(compiled: CompiledGrammar) -> str | None:
    """Follows an arbitrary output: ambiguity that grows with its length shows there."""
    vocabulary, matcher, sample = compiled.vocabulary, compiled.follow(()).fork(), b""
    masks, choose = vocabulary.new_masks(1), random.Random(0)
    for _ in range(SAMPLE_BYTES):
        if compiled.shortest_len is not None and len(sample) % END_EVERY_BYTES == 0:
            state = compiled.follow(vocabulary.tokens_of(sample))
            begin_s = time.process_time()
            state.shortest_end()
            if time.process_time() - begin_s > MAX_END_S:
                return f"is too large: finding a short end of an output takes more than {MAX_END_S:g} s"
        begin_s = time.process_time()
        compiled.fill(matcher, masks)
        allowed = vocabulary.allowed_bytes(masks[0].numpy()).tolist()
        if not allowed:
            is_end = matcher.is_completed()
            return (
                None
                if is_end
                else f"allows no token after {sample[-80:].decode(errors='replace')!r}: no output matches it there"
            )
        sample += bytes([choose.choice(allowed)])
        matcher.accept_string(sample[-1:])
        if time.process_time() - begin_s > MAX_MASK_S:
            return f"is too ambiguous: finding the next tokens takes more than {1e3 * MAX_MASK_S:g} ms"
    return None


def main(folder: str, vocab_size: str, cpu_s: str, hang_s: str, *others: str) -> None:
    eos_token_ids = [int(one) for one in others if one.isdigit()]
    lines = [socket.socket(fileno=int(one.removeprefix("--line="))) for one in others if not one.isdigit()]
    grammars = Grammars(GrammarVocabulary(Path(folder), int(vocab_size), eos_token_ids))
    _ = grammars.vocabulary.string_masks  # for all checks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line, selectors.EVENT_READ, (line, line.makefile("rb")))
            _write(line, {"ready": True})
        while True:
            for key, _ in selector.select():
                line, questions = key.data
                question = questions.readline()
                if not question:
                    return
                if not os.fork():
                    _answer(grammars, line, json.loads(question), int(cpu_s), float(hang_s))


def _answer(grammars: Grammars, line: socket.socket, question: dict[str, str], cpu_s: int, hang_s: float) -> NoReturn:
    """Makes the check in a process that limits end, and waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    read_end, write_end = os.pipe()
    checking = os.fork()
    if not checking:
        _limit(cpu_s, hang_s)
        error = refusal(grammars, Grammar(GrammarKind(question["kind"]), question["source"]))
        os.write(write_end, json.dumps(error).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        found = answer.read()
    _, status, usage = os.wait4(checking, 0)
    ended = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    _write(line, {"error": json.loads(found) if not ended else None, "ended": abs(ended) or None, "cpu_s": cpu})
    os._exit(0)


def _limit(cpu_s: int, hang_s: float) -> None:
    """Has this process ended by SIGXCPU, SIGALRM, or for want of memory."""
    signal.setitimer(signal.ITIMER_REAL, hang_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + DATA_BYTES, used + DATA_BYTES))


def _write(line: socket.socket, answer: dict[str, Any]) -> None:
    line.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
