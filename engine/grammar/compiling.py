"""Compiling grammars, with a cache per process."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

import torch
import xgrammar

from cluster.errors import InvalidField, ModelUnavailable
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from engine.grammar.closing import MAX_COST
from engine.grammar.json_pattern import repeats_fault, with_plain_codes
from engine.grammar.json_rules import reason_of, rules_of
from engine.grammar.schema_rules import checked, pattern_fault
from engine.grammar.state import GrammarState
from engine.grammar.tag_rules import checked_tag
from engine.grammar.vocabulary import GrammarVocabulary

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**20  # of a compiled grammar
MAX_TOTAL_BYTES = 256 * 2**20  # of those in memory, in use or not
WHOLE_COST = 64 * MAX_COST  # to find a short output; no round waits for it


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class CompiledGrammar:
    """Immutable, so threads and requests share it."""

    grammar: Grammar
    compiled: xgrammar.CompiledGrammar
    vocabulary: GrammarVocabulary
    required_names: frozenset[str] = frozenset()  # of the objects of its JSON schemas
    counts_chars: bool = False  # of strings (`json_rules`)
    shortest: bytes = b""  # a short output, if one was found
    shortest_len: int | None = None  # its tokens, with the end of sequence; None: none was found

    def follow(self, token_ids: Sequence[int], max_tokens: int = 0) -> GrammarState:
        """A new state after the output so far, which has at most ``max_tokens`` in all."""
        return GrammarState(self, token_ids, max_tokens)

    def fill(self, matcher: xgrammar.GrammarMatcher, masks: torch.Tensor, row: int = 0) -> None:
        """Writes the tokens that may follow what ``matcher`` has followed. It has not terminated, and is left as it was."""
        if self.counts_chars:
            self.vocabulary.string_masks.fill(matcher, masks, row)
        else:
            matcher.fill_next_token_bitmask(masks, row)

    @property
    def num_bytes(self) -> int:
        return self.compiled.memory_size_bytes + len(self.grammar.source)

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
        self._alive: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()  # those in use included

    @property
    def is_full(self) -> bool:
        """Whether those in use, with one that was just compiled, take more memory than is allowed: it must be given up."""
        with self._lock:
            return self._num_bytes() > MAX_TOTAL_BYTES

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """A grammar compiled before, unless it was evicted since and no request uses it."""
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
            return self._alive.get(grammar)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Grammars that no request uses are evicted where it needs their memory, least recently used first.

        Raises InvalidField: it is malformed, too large, or cannot be enforced; says why.
        """
        found = self.known(grammar)
        if found is not None:
            return found
        source, names, counts_chars = grammar.source, frozenset[str](), False
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema, names = checked(source)
                source, counts_chars = rules_of(schema)
            case GrammarKind.JSON_OBJECT:
                source, counts_chars = rules_of({"type": "object"})
            case GrammarKind.STRUCTURAL_TAG:
                source, names, counts_chars = checked_tag(source)
            case GrammarKind.REGEX:
                if (fault := pattern_fault(source)) is not None:
                    raise InvalidField(grammar.kind, source[:80], fault)
                source = with_plain_codes(source)
            case GrammarKind.EBNF if (fault := repeats_fault(source, is_regex=False)) is not None:
                raise InvalidField(grammar.kind, source[:80], fault)
        try:
            native = self._compile(grammar.kind, source)
            compiled = CompiledGrammar(grammar, native, self.vocabulary, names, counts_chars)
            whole = compiled.follow(()).shortest_end(WHOLE_COST)
            if whole is not None:
                compiled = replace(compiled, shortest=whole, shortest_len=len(self.vocabulary.tokens_of(whole)) + 1)
        except (RuntimeError, ValueError, TypeError) as error:  # xgrammar's own, and those of its native part
            raise InvalidField(grammar.kind, grammar.source[:80], reason_of(error)) from error
        if compiled.num_bytes > MAX_BYTES:
            reason = f"takes {compiled.num_bytes >> 20} MiB compiled, at most {MAX_BYTES >> 20} are possible"
            raise InvalidField(grammar.kind, grammar.source[:80], reason)
        with self._lock:
            self._alive[grammar] = compiled
            self._evict()
            if self._num_bytes() <= MAX_TOTAL_BYTES:
                self._known[grammar] = compiled
        return compiled

    def follow(self, sampling: SamplingParams, token_ids: Sequence[int]) -> GrammarState | None:
        """A new state after the output so far of a request; None: it has no grammar. Raises as ``compile``, which takes no
        time if the grammar is in use."""
        if sampling.grammar is None:
            return None
        return self.compile(sampling.grammar).follow(token_ids, sampling.max_tokens)

    def _num_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._alive.values())

    def _evict(self) -> None:
        """A grammar that no request uses is freed at once when it leaves ``_known``."""
        for grammar in tuple(self._known):
            if self._num_bytes() <= MAX_TOTAL_BYTES:
                return
            del self._known[grammar]
            used = self._alive.get(grammar)
            if used is not None:
                self._known[grammar] = used

    def _compile(self, kind: GrammarKind, source: str) -> xgrammar.CompiledGrammar:
        match kind:
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(source)
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiler.compile_structural_tag(source)
        return self._compiler.compile_grammar(source)


@cache
def grammars_of(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """This process's grammars of a model. Raises as `GrammarVocabulary`."""
    return Grammars(GrammarVocabulary(folder, vocab_size, eos_token_ids))


def known_grammars(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars | None:
    """``grammars_of``; None, with a warning, where the tokenizer tells no bytes or the model has no end of sequence."""
    try:
        if not eos_token_ids:
            raise ModelUnavailable("the model has no end-of-sequence token")
        return grammars_of(folder, vocab_size, eos_token_ids)
    except ModelUnavailable as error:
        logger.warning("structured output is not available: %s", error)
        return None
