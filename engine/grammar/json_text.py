"""Whether the strings of a pattern are JSON. xgrammar takes some quotes, backslashes and control characters of a pattern
literally: those of ranges that reach beyond ASCII, of patterns that are large, and those that stand alone.
"""

import json

import numpy as np
import xgrammar

from cluster.grammar import Grammar, GrammarKind
from engine.grammar.closing import samples
from engine.grammar.compiling import Grammars

MAX_STATES = 64
_QUOTE, _BACKSLASH, _SPACE = b'"\\ '
_ESCAPED = frozenset(b'"\\/bfnrtu')


def spells_json(grammars: Grammars, pattern: str, *, on_one_line: bool) -> bool:
    """As far as a search of few states tells.

    Args:
        on_one_line: whether masks forbid control characters.
    """
    schema = json.dumps({"type": "string", "pattern": pattern})
    search = _Search(grammars, on_one_line)
    matcher = grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, schema)).follow(()).fork()
    matcher.accept_string('"')
    states, seen = [matcher], set[bytes]()
    while states and len(seen) < MAX_STATES:
        state = states.pop(0)
        allowed, mask, _ = search.next(state)
        if mask in seen:
            continue
        seen.add(mask)
        if allowed and min(allowed) < _SPACE:
            return False
        tried = {*samples(np.array(allowed, np.int64)), *(byte for byte in (_QUOTE, _BACKSLASH) if byte in allowed)}
        for byte in sorted(tried):
            child = state.fork()
            child.accept_string(bytes([byte]))
            following, _, _ = search.next(child)
            if byte == _QUOTE and following:
                return False  # it ended the string
            if byte == _BACKSLASH:
                escapes = [child.fork() for _ in following]
                if not _ESCAPED.issuperset(following):
                    return False
                for escape, one in zip(escapes, following, strict=True):
                    escape.accept_string(bytes([one]))
                if any(search.next(escape)[2] for escape in escapes):
                    return False  # the string must not end with an escaped quote
                states += escapes
            elif byte != _QUOTE:
                states.append(child)
    return True


class _Search:
    def __init__(self, grammars: Grammars, on_one_line: bool) -> None:
        self._vocabulary = grammars.vocabulary
        self._on_one_line = on_one_line
        self._masks = grammars.vocabulary.new_masks(1)

    def next(self, matcher: xgrammar.GrammarMatcher) -> tuple[list[int], bytes, bool]:
        """The bytes that may follow, the mask, and whether the output may end."""
        matcher.fill_next_token_bitmask(self._masks)
        mask = self._masks[0].numpy()
        if self._on_one_line:
            mask &= self._vocabulary.on_one_line
        return self._vocabulary.allowed_bytes(mask).tolist(), mask.tobytes(), self._vocabulary.allows_end(mask)
