"""``drafters.ensemble.LookupEnsemble`` of lookups in C, by ``ensemble.c``. No torch."""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafters.consensus import ComparedDraft, Consensus
from drafters.ensemble import MAX_SPLICES, MIN_SURVIVAL, WORTH_SPLICING, MemberDraft
from drafters.native.lookup import Batch, Drafts, Native, NativeLookup, address
from drafters.protocol import PRICE_SHARE, Demand, Draft
from router.estimates.survival import OnlineSurvival

MOST_MEMBERS = 8  # as in ensemble.c

_INT, _DOUBLE, _AT = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_DOUBLES = ctypes.POINTER(_DOUBLE)


class _Member(ctypes.Structure):
    _fields_ = [(name, _AT) for name in ("drafter", "open", "extend", "propose", "release", "check", "maps")]


class _Setup(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num_members", "num_witnesses", "num_places", "num_steps", "num_case_steps")),
        ("max_splices", _INT),
        *((name, _DOUBLE) for name in ("price_share", "min_survival", "worth_splicing")),
        ("case_maps", _AT),
        ("due_at", _AT),
        ("members", _Member * MOST_MEMBERS),
    ]


class _Trials(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num_records", "num", "size")),
        ("at", ctypes.POINTER(_INT)),
        ("told", _DOUBLES),
        ("came_true", ctypes.POINTER(ctypes.c_uint8)),
    ]


class _Guess(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num", "num_worth")),
        ("expected_len", _DOUBLE),
        ("token_ids", ctypes.POINTER(ctypes.c_int32)),
        ("cases", ctypes.POINTER(_INT)),
        *((name, _DOUBLES) for name in ("confidences", "told", "survival")),
    ]


class NativeEnsemble(Native):
    """Of ``lookups``: all free members, and the only ones that splice.

    Args:
        survival: calibration of all members, the free ones first.

    Raises:
        MemoryError: out of memory.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        lookups: Sequence[NativeLookup],
        survival: Sequence[OnlineSurvival],
        consensus: Consensus,
    ) -> None:
        self._lookups = lookups
        self._survival = survival
        self._consensus = consensus
        self._due_at = array("q", [*(one.num_due for one in survival[: len(lookups)]), consensus.num_missing])
        num_places, num_values = survival[0].table.shape
        setup = _Setup(
            num_members=len(lookups),
            num_witnesses=consensus.num_witnesses,
            num_places=num_places,
            num_steps=num_values - 1,
            num_case_steps=consensus.table.shape[1] - 1,
            max_splices=MAX_SPLICES,
            price_share=PRICE_SHARE,
            min_survival=MIN_SURVIVAL,
            worth_splicing=WORTH_SPLICING,
            case_maps=consensus.table.ctypes.data,
            due_at=address(self._due_at),
        )
        for i, (lookup, own) in enumerate(zip(lookups, survival, strict=False)):
            functions = (lookup.function(name) for name in ("open", "extend", "propose", "release", "check"))
            pointers = (ctypes.cast(function, _AT).value for function in functions)
            setup.members[i] = _Member(lookup.handle, *pointers, own.table.ctypes.data)
        new = library.ensemble_new
        new.argtypes, new.restype = (_AT,), _AT
        super().__init__(library, "ensemble", new(ctypes.addressof(setup)))
        self._hear = self.function("hear", _AT, _AT, _AT, _AT)
        self._settle = self.function("settle", _AT, _INT, _AT, _INT, *(_AT,) * 4)
        self._splice = self.function("splice", _AT, _INT, _INT, _AT, _AT, result=_INT)
        self._best = self.function("best", _AT, _INT, result=_INT)
        self._guess = self.function("guess", _AT, _INT, _INT, _AT, result=None)
        self._due = self.function("due", _AT, result=_INT)
        self._take = self.function("take", _AT, _INT, _AT, result=None)
        self._batch, self._settled = Batch(), Drafts()
        self._demands: Sequence[Demand] = ()

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        super().extend(request_id, token_ids)
        self._take_up()

    def hear(self, demands: Sequence[Demand]) -> list[float]:
        self._demands = demands
        prices = array("d", [demand.row_price for demand in demands])
        expected_lens = array("d", [0.0]) * len(demands)
        at = self._batch.packed(demands, self.slots)
        if self._hear(self.handle, at, address(prices), address(expected_lens)):
            raise MemoryError(f"no memory for {len(demands)} drafts")
        return expected_lens.tolist()

    def best(self, place: int) -> MemberDraft:
        return self._read(place, self._best(self.handle, place))

    def weigh(self, place: int, member: int, draft: Draft) -> MemberDraft:
        heard = tuple(self._read(place, lookup).token_ids for lookup in range(len(self._lookups)))
        price = self._demands[place].row_price
        return MemberDraft.of(member, draft, self._survival[member], self._consensus, heard, price)

    def settle(self, places: Sequence[int]) -> list[tuple[int, Draft]]:
        num, settled = len(places), self._settled
        settled.make_room(num, self._batch.drafts.stride)
        wanted, members = array("q", places), array("q", [0]) * num
        rooms = [address(room) for room in (settled.token_ids, settled.confidences, settled.lens, members)]
        if self._settle(self.handle, num, address(wanted), settled.stride, *rooms):
            raise MemoryError(f"no memory for {num} drafts")
        drafts = settled.read([self._demands[place].request_id for place in places])
        return list(zip(members.tolist(), drafts, strict=True))

    def spliced(self, place: int, guess: MemberDraft) -> Draft:
        demand, num = self._demands[place], len(guess.token_ids)
        spare = max(0, demand.num_tokens - num)
        token_ids = array("i", guess.token_ids) + array("i", [0]) * spare
        confidences = array("d", guess.survival) + array("d", [0.0]) * spare
        kept = self._splice(self.handle, place, num, address(token_ids), address(confidences))
        if kept < 0:
            raise MemoryError(f"no memory for a draft of {demand.num_tokens} tokens")
        return Draft(demand.request_id, tuple(token_ids[:kept]), tuple(confidences[:kept]))

    def judge(self, guess: MemberDraft, token_ids: Sequence[int]) -> None:
        guess.teach(token_ids, self._survival[guess.member], self._consensus)
        self._due_at[-1] = self._consensus.num_missing
        self._take_up()

    def _read(self, place: int, member: int) -> MemberDraft:
        """A lookup's draft."""
        found = _Guess()
        self._guess(self.handle, place, member, ctypes.addressof(found))
        num = found.num
        testimony = ComparedDraft(tuple(found.told[:num]), tuple(found.cases[:num]), tuple(found.survival[:num]))
        token_ids, confidences = tuple(found.token_ids[:num]), tuple(found.confidences[:num])
        return MemberDraft(member, token_ids, confidences, testimony, found.num_worth, found.expected_len)

    def _take_up(self) -> None:
        """Takes the pending trials of members, and of their comparison."""
        due, last = self._due(self.handle), len(self._lookups)
        for number in range(last + 1) if due else ():
            if due >> number & 1:
                trials = _Trials()
                self._take(self.handle, number, ctypes.addressof(trials))
                at, told, came_true = (_copied(trials.num, one) for one in (trials.at, trials.told, trials.came_true))
                if number < last:
                    self._survival[number].record_all(trials.num_records, at, told, came_true.astype(np.bool_))
                    self._due_at[number] = self._survival[number].num_due
                else:
                    self._consensus.learn(at, told, came_true.astype(np.bool_))
                    self._due_at[number] = self._consensus.num_missing


def _copied(num: int, at: Any) -> NDArray[Any]:
    """A copy of ``num`` values, possibly none."""
    return np.ctypeslib.as_array(at, (num,)).copy() if num else np.zeros(0, at._type_)
