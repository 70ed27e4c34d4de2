"""Lookups in C. No torch."""

import ctypes
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft, Drafter, salt_key
from engine.compiling import NoCompiler, load_compiled

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("automaton.c", "ensemble.c", "ngram.c", "suffix.c", "table.c"))
_HEADERS = (_FOLDER / "automaton.h", _FOLDER / "lookup.h", _FOLDER.parents[1] / "engine" / "noise.h")
_FLAGS = ("-ffp-contract=off",)  # a multiplication and an addition are rounded as Python rounds them

# A suffix draft ends before the probability that all of it is right falls below this.
MIN_SURVIVAL = 0.15
# A token's confidence is its share of the continuations, c / (total + doubt / match length). With this doubt, confidences
# from 0.4 up agreed with the accepted share within 0.05 on SmolLM2-135M's answers.
DOUBT = 2.0
MAX_MATCH_LEN = 16  # in other answers; a request's own text has no limit
REQUEST_TOKENS = 8192  # a request's automaton remembers between half of this and all of it

_INT, _DOUBLE, _AT = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_NEW = {
    "ngram": (_INT, _INT),  # max_match_len, min_match_len
    # max_match_len, max_shared_tokens, min_match_len, min_survival, doubt, request_tokens
    "suffix": (_INT, _INT, _INT, _DOUBLE, _DOUBLE, _INT),
    # contexts of the table, their keys, token_ids and probabilities; max_learned, min_confidence
    "table": (_INT, _AT, _AT, _AT, _INT, _DOUBLE),
}


def load_library(folder: Path | None = None) -> ctypes.CDLL:
    """The compiled lookups. Raises ``engine.compiling.NoCompiler``."""
    return load_compiled("lookups", _SOURCES, _HEADERS, _FLAGS, folder, keeps_gil=True)


class Lookup(Drafter, Protocol):
    """A Python lookup with a C implementation: `ngram`, and those of `tests/reference/`."""

    kind: str

    @property
    def settings(self) -> tuple[float, ...]:
        """Arguments of ``{kind}_new`` in the order of ``_NEW``. Addresses are valid while this lives."""


def compiled(drafter: Lookup) -> Drafter:
    """The C implementation of a drafter without sessions, or the drafter itself where there is no compiler."""
    library = lookups()
    return drafter if library is None else NativeLookup(library, drafter.kind, *drafter.settings, keep=drafter)


def suffix(library: ctypes.CDLL, max_shared_tokens: int) -> "NativeLookup":
    """Follows the most frequent continuation of the longest match, in the request's own text or in recent answers.

    After SuffixDecoding (arXiv 2411.04975), on suffix automata, which need no depth limit and a tenth of the nodes. A
    request reads recent answers with its own salt only. All together have ``max_shared_tokens``. An automaton takes about
    140 bytes per token of natural text, and at most 450.
    """
    return NativeLookup(library, "suffix", MAX_MATCH_LEN, max_shared_tokens, 1, MIN_SURVIVAL, DOUBT, REQUEST_TOKENS)


@cache
def lookups() -> ctypes.CDLL | None:
    """The library; None without a compiler, which is logged once."""
    try:
        return load_library()
    except NoCompiler as error:
        logger.warning("lookups cannot be compiled, so that ngram drafts for suffix and table, in Python: %s", error)
        return None


class _Demands(ctypes.Structure):
    _fields_ = [
        ("num", _INT),
        *((name, _AT) for name in ("slots", "num_tokens", "least_survival", "ahead", "ahead_ends")),
        ("stride", _INT),
        *((name, _AT) for name in ("token_ids", "confidences", "lens")),
    ]


class Drafts:
    """Buffers for the drafts of a batch, filled by C: draft i starts at ``i * stride``."""

    def __init__(self) -> None:
        self.stride = 0
        self.token_ids, self.confidences, self.lens = array("i"), array("d"), array("q")

    def make_room(self, num: int, stride: int) -> None:
        self.stride = stride
        if num * stride > len(self.token_ids):
            self.token_ids, self.confidences = array("i", [0]) * (num * stride), array("d", [0.0]) * (num * stride)
        if num > len(self.lens):
            self.lens = array("q", [0]) * num

    def read(self, request_ids: Sequence[str]) -> list[Draft]:
        stride, lens = self.stride, self.lens
        end = len(request_ids) * stride
        token_ids, confidences = self.token_ids[:end].tolist(), self.confidences[:end].tolist()  # sooner than one by one
        spans = [slice(place * stride, place * stride + lens[place]) for place in range(len(request_ids))]
        rows = zip(request_ids, spans, strict=True)
        return [Draft(request_id, tuple(token_ids[span]), tuple(confidences[span])) for request_id, span in rows]


class PackedDemands:
    """Demands, with buffers for their drafts, in C's layout."""

    def __init__(self) -> None:
        self.drafts = Drafts()
        self._demands = _Demands()
        self._arrays: tuple[array[int] | array[float], ...] = ()  # that the demands point to

    def packed(self, demands: Sequence[Demand], slots: Mapping[str, int]) -> int:
        """Returns their address, valid until the next call."""
        num, stride = len(demands), max((demand.num_tokens for demand in demands), default=0)
        self.drafts.make_room(num, stride)
        ahead, ahead_ends = array("i"), array("q")
        for demand in demands:
            ahead.extend(demand.ahead)
            ahead_ends.append(len(ahead))
        self._arrays = (
            array("q", [slots[demand.request_id] for demand in demands]),
            array("q", [demand.num_tokens for demand in demands]),
            array("d", [demand.terms.least_survival for demand in demands]),
            ahead,
            ahead_ends,
        )
        to, drafts = self._demands, self.drafts
        to.num, to.stride = num, stride
        to.slots, to.num_tokens, to.least_survival, to.ahead, to.ahead_ends = (address(one) for one in self._arrays)
        to.token_ids, to.confidences, to.lens = address(drafts.token_ids), address(drafts.confidences), address(drafts.lens)
        return ctypes.addressof(to)


def address(values: "array[int] | array[float]") -> int:
    return values.buffer_info()[0]


class Native:
    """A drafter in C: functions of ``library`` that begin with ``kind``. All raise MemoryError; ``open`` and ``extend``
    raise OverflowError and change nothing for a token of more than 31 bits. ``handle``, of ``{kind}_new``, is freed with
    this; ``keep`` keeps alive what it points to."""

    handle: int | None = None

    def __init__(self, library: ctypes.CDLL, kind: str, handle: int | None, keep: object = None) -> None:
        self.library, self.kind = library, kind
        self._keep = keep
        self.slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        if not handle:
            raise MemoryError(f"no memory for a {kind} drafter")
        slot, ids = (_AT, _INT), (_AT, _INT)
        self._free = self.function("free", _AT, result=None)
        self._open = self.function("open", *slot, *ids, ctypes.c_uint64, _DOUBLE, ctypes.c_uint64)
        self._extend = self.function("extend", *slot, *ids)
        self._release = self.function("release", *slot, result=None)
        self._check = self.function("check", _AT, result=ctypes.c_char_p)
        self.handle = handle

    def __del__(self) -> None:
        if self.handle:
            self._free(self.handle)

    def function(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """``{kind}_{name}`` of the library."""
        found = self.library[f"{self.kind}_{name}"]  # an object of its own each time
        found.argtypes, found.restype = arguments, result
        return found

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        ids = array("i", token_ids)
        at, num = ids.buffer_info()
        slot = self.slots.get(request_id)
        if slot is None:
            slot = self.slots[request_id] = self._free_slots.pop() if self._free_slots else len(self.slots)
        seed = sampling.seed & 0xFFFFFFFFFFFFFFFF
        if self._open(self.handle, slot, at, num, seed, sampling.temperature, salt_key(salt)):
            self.release(request_id)
            raise MemoryError(f"no memory to follow a request of {num} tokens")

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        ids = array("i", token_ids)
        at, num = ids.buffer_info()
        if self._extend(self.handle, self.slots[request_id], at, num):
            raise MemoryError(f"no memory for {num} more tokens of a request")

    def release(self, request_id: str) -> None:
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._release(self.handle, slot)
            self._free_slots.append(slot)

    def check_integrity(self) -> None:
        wrong = self._check(self.handle)
        assert wrong is None, wrong.decode()


class NativeLookup(Native):
    """``drafters.protocol.Drafter`` in C. ``arguments``: of ``{kind}_new``, in the order of ``_NEW``."""

    def __init__(self, library: ctypes.CDLL, kind: str, *arguments: float | None, keep: object = None) -> None:
        new = library[f"{kind}_new"]
        new.argtypes, new.restype = _NEW[kind], _AT
        super().__init__(library, kind, new(*arguments), keep)
        self._propose = self.function("propose", _AT, _AT)
        self._batch = PackedDemands()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(lookup=self)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        if self._propose(self.handle, self._batch.packed(demands, self.slots)):
            raise MemoryError(f"no memory for {len(demands)} drafts")
        return self._batch.drafts.read([demand.request_id for demand in demands])
