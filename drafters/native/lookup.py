"""Lookups in C: the same drafts as of those in Python, in a tenth of the time. No torch."""

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

from cluster.types import SamplingParams
from drafters.protocol import Demand, Draft
from engine.compiling import load_compiled

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("automaton.c", "ngram.c", "suffix.c", "table.c"))
_HEADERS = (_FOLDER / "automaton.h", _FOLDER / "lookup.h", _FOLDER.parents[1] / "engine" / "noise.h")
_FLAGS = ("-ffp-contract=off",)  # a multiplication and an addition are rounded as Python rounds them

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
    return load_compiled("lookups", _SOURCES, _HEADERS, _FLAGS, folder)


class _Demands(ctypes.Structure):
    _fields_ = [
        ("num", _INT),
        *((name, _AT) for name in ("slots", "num_tokens", "least_survival", "ahead", "ahead_ends")),
        ("stride", _INT),
        *((name, _AT) for name in ("token_ids", "confidences", "lens")),
    ]


class NativeLookup:
    """``drafters.protocol.Drafter`` by the functions of ``library`` that begin with ``kind``.

    Args:
        arguments: of ``{kind}_new``, in the order of ``_NEW``.
        keep: what these point to.

    Raises:
        MemoryError: there is none for it.
    """

    def __init__(self, library: ctypes.CDLL, kind: str, *arguments: float | None, keep: object = None) -> None:
        new = library[f"{kind}_new"]
        new.argtypes, new.restype = _NEW[kind], _AT
        self._free = library[f"{kind}_free"]
        self._free.argtypes, self._free.restype = (_AT,), None
        self._handle = new(*arguments)
        self._keep = keep
        if not self._handle:
            raise MemoryError(f"no memory for a {kind} drafter")
        slot, ids = (_AT, _INT), (_AT, _INT)
        self._open = library[f"{kind}_open"]
        self._open.argtypes = (*slot, *ids, ctypes.c_uint64, _DOUBLE)
        self._extend = library[f"{kind}_extend"]
        self._extend.argtypes = (*slot, *ids)
        self._propose = library[f"{kind}_propose"]
        self._propose.argtypes = (_AT, _AT)
        self._release = library[f"{kind}_release"]
        self._release.argtypes, self._release.restype = slot, None
        self._check = library[f"{kind}_check"]
        self._check.argtypes, self._check.restype = (_AT,), ctypes.c_char_p
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._demands = _Demands()
        self._at = ctypes.addressof(self._demands)
        self._token_ids, self._confidences, self._lens = array("i"), array("d"), array("q")

    def __del__(self) -> None:
        if self._handle:
            self._free(self._handle)

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = self._free_slots.pop() if self._free_slots else len(self._slots)
        ids = array("i", token_ids)
        at, num = ids.buffer_info()
        if self._open(self._handle, slot, at, num, sampling.seed & 0xFFFFFFFFFFFFFFFF, sampling.temperature):
            self.release(request_id)
            raise MemoryError(f"no memory to follow a request of {num} tokens")

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        ids = array("i", token_ids)
        at, num = ids.buffer_info()
        if self._extend(self._handle, self._slots[request_id], at, num):
            raise MemoryError(f"no memory for {num} more tokens of a request")

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        num, stride = len(demands), max((demand.num_tokens for demand in demands), default=0)
        if num * stride > len(self._token_ids):
            self._token_ids, self._confidences = array("i", [0]) * (num * stride), array("d", [0.0]) * (num * stride)
        if num > len(self._lens):
            self._lens = array("q", [0]) * num
        slots = array("q", [self._slots[demand.request_id] for demand in demands])
        num_tokens = array("q", [demand.num_tokens for demand in demands])
        least = array("d", [demand.least_survival for demand in demands])
        ahead, ahead_ends = array("i"), array("q")
        for demand in demands:
            ahead.extend(demand.ahead)
            ahead_ends.append(len(ahead))
        own = self._demands
        own.num, own.stride = num, stride
        own.slots, own.num_tokens = slots.buffer_info()[0], num_tokens.buffer_info()[0]
        own.least_survival = least.buffer_info()[0]
        own.ahead, own.ahead_ends = ahead.buffer_info()[0], ahead_ends.buffer_info()[0]
        own.token_ids, own.confidences = self._token_ids.buffer_info()[0], self._confidences.buffer_info()[0]
        own.lens = self._lens.buffer_info()[0]
        if self._propose(self._handle, self._at):
            raise MemoryError(f"no memory for {num} drafts")
        drafts = []
        for i, demand in enumerate(demands):
            start = i * stride
            end = start + self._lens[i]
            token_ids, confidences = tuple(self._token_ids[start:end]), tuple(self._confidences[start:end])
            drafts.append(Draft(demand.request_id, token_ids, confidences))
        return drafts

    def release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._release(self._handle, slot)
            self._free_slots.append(slot)

    def check_integrity(self) -> None:
        wrong = self._check(self._handle)
        assert wrong is None, wrong.decode()
