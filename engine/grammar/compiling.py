"""Compiling grammars, with a cache per process."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import xgrammar

from cluster.errors import InvalidField
from cluster.grammar import Grammar, GrammarKind
from engine.grammar.vocabulary import GrammarVocabulary

CACHE_BYTES = 256 * 2**20
# As json.dumps writes it: a grammar that leaves whitespace free lets a model write it without end.
SEPARATORS = (", ", ": ")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Immutable, so threads and requests share it."""

    grammar: Grammar
    compiled: xgrammar.CompiledGrammar
    vocabulary: GrammarVocabulary

    @property
    def is_json(self) -> bool:
        """Whether the whole output is one JSON value."""
        return self.grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)


class Grammars:
    """Compiles grammars for one model. Any thread may call it; xgrammar releases the interpreter lock while it compiles."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """A grammar compiled before, unless it was evicted since."""
        with self._lock:
            found = self._known.get(grammar)
            if found is not None:
                self._known.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidField: xgrammar refuses it; says why."""
        found = self.known(grammar)
        if found is not None:
            return found
        try:
            compiled = CompiledGrammar(grammar, self._compile(grammar), self.vocabulary)
        except (RuntimeError, ValueError, TypeError) as error:  # xgrammar's own, and those of its native part
            raise InvalidField(grammar.kind, grammar.source[:80], _reason(error)) from error
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = compiled
                self._num_bytes += compiled.compiled.memory_size_bytes
            while self._num_bytes > CACHE_BYTES and len(self._known) > 1:
                self._num_bytes -= self._known.popitem(last=False)[1].compiled.memory_size_bytes
        return compiled

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiler, source = self._compiler, grammar.source
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                return compiler.compile_json_schema(
                    '{"type": "object"}', any_whitespace=False, separators=SEPARATORS, strict_mode=False
                )
            case GrammarKind.JSON_SCHEMA:
                return compiler.compile_json_schema(source, any_whitespace=False, separators=SEPARATORS)
            case GrammarKind.REGEX:
                return compiler.compile_regex(source)
            case GrammarKind.EBNF:
                return compiler.compile_grammar(source)
            case GrammarKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(source)


@cache
def grammars_of(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """This process's grammars of a model."""
    return Grammars(GrammarVocabulary(folder, vocab_size, eos_token_ids))


def _reason(error: Exception) -> str:
    """Without the time and the place in xgrammar's source that its messages begin with."""
    lines = str(error).strip().splitlines()
    return (lines[0].split(": ", 1)[-1] if lines else type(error).__name__).strip()[:300]
