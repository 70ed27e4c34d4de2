"""Checks grammars in a process of its own, which its parent ends when a check takes too long or takes the process down.

Reads one JSON object a line, {"kind", "source"}, and writes {"error": null or why it is refused}. A grammar is refused that
is malformed, that cannot be enforced, that no output seems to match, or whose masks take too long.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path

from cluster.errors import InvalidField
from cluster.grammar import Grammar, GrammarKind
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
            return None
        sample += bytes([choose.choice(allowed)])
        matcher.accept_string(sample[-1:])
        if time.process_time() - begin_s > MAX_MASK_S:
            return f"is too ambiguous: finding the next tokens takes more than {1e3 * MAX_MASK_S:g} ms"
    return None


def main(folder: str, vocab_size: str, *eos_token_ids: str) -> None:
    grammars = Grammars(GrammarVocabulary(Path(folder), int(vocab_size), [int(one) for one in eos_token_ids]))
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + DATA_BYTES, used + DATA_BYTES))
    print(json.dumps({"error": None}), flush=True)  # it is ready
    for line in sys.stdin:
        asked = json.loads(line)
        error = refusal(grammars, Grammar(GrammarKind(asked["kind"]), asked["source"]))
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
