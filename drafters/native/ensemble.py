"""``drafters.ensemble.PlainEnsemble`` for lookups in C, by ``ensemble.c``. No torch."""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.types import PRICE_SHARE
from drafters.consensus import ComparedDraft, Consensus
from drafters.ensemble import MAX_SPLICES, MIN_SPLICE_SURVIVAL, MIN_SURVIVAL, MemberDraft
from drafters.native.lookup import Drafts, Native, NativeLookup, PackedDemands, address
from drafters.protocol import Demand, Draft
from router.estimates.survival import OnlineSurvival

MOST_MEMBERS = 8  # as in ensemble.c

_INT, _DOUBLE, _AT = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_DOUBLES = ctypes.POINTER(_DOUBLE)


class _Member(ctypes.Structure):
    _fields_ = [(name, _AT) for name in ("drafter", "open", "extend", "propose", "release", "check", "maps")]


class _Setup(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num_members", "num_references", "num_places", "num_steps", "num_case_steps")),
        ("max_splices", _INT),
        *((name, _DOUBLE) for name in ("price_share", "min_survival", "min_splice_survival")),
        ("case_maps", _AT),
        ("due_at", _AT),
        ("members", _Member * MOST_MEMBERS),
    ]


class _Trials(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num_records", "num", "size")),
        ("at", ctypes.POINTER(_INT)),
        ("conditional", _DOUBLES),
        ("was_right", ctypes.POINTER(ctypes.c_uint8)),
    ]


class _NativeDraft(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("num", "num_paying")),
        ("expected_len", _DOUBLE),
        ("token_ids", ctypes.POINTER(ctypes.c_int32)),
        ("cases", ctypes.POINTER(_INT)),
        *((name, _DOUBLES) for name in ("confidences", "conditional", "survival")),
    ]


class NativeEnsemble(Native):
    """Of ``lookups``: all free members, and the only ones that splice. ``survival`` calibrates all members, these first.
    Raises MemoryError."""

    def __init__(
        self, library: ctypes.CDLL, lookups: Sequence[NativeLookup], survival: Sequence[OnlineSurvival], consensus: Consensus
    ) -> None:
        self._lookups = lookups
        self._survival = survival
        self._consensus = consensus
        self._due_at = array("q", [*(one.num_due for one in survival[: len(lookups)]), consensus.num_until_due])
        num_places, num_values = survival[0].table.shape
        setup = _Setup(
            num_members=len(lookups),
            num_references=consensus.num_references,
            num_places=num_places,
            num_steps=num_values - 1,
            num_case_steps=consensus.table.shape[1] - 1,
            max_splices=MAX_SPLICES,
            price_share=PRICE_SHARE,
            min_survival=MIN_SURVIVAL,
            min_splice_survival=MIN_SPLICE_SURVIVAL,
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
        self._query = self.function("query", _AT, _AT, _AT, _AT)
        self._best_drafts = self.function("best_drafts", _AT, _INT, _AT, _INT, *(_AT,) * 4)
        self._splice = self.function("splice", _AT, _INT, _INT, _AT, _AT, result=_INT)
        self._best = self.function("best", _AT, _INT, result=_INT)
        self._draft = self.function("draft", _AT, _INT, _INT, _AT, result=None)
        self._due = self.function("due", _AT, result=_INT)
        self._take = self.function("take", _AT, _INT, _AT, result=None)
        self._batch, self._found = PackedDemands(), Drafts()
        self._demands: Sequence[Demand] = ()

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        super().extend(request_id, token_ids)
        self._learn_due()

    def query(self, demands: Sequence[Demand]) -> list[float]:
        self._demands = demands
        prices = array("d", [demand.terms.row_price for demand in demands])
        expected_lens = array("d", [0.0]) * len(demands)
        at = self._batch.packed(demands, self.slots)
        if self._query(self.handle, at, address(prices), address(expected_lens)):
            raise MemoryError(f"no memory for {len(demands)} drafts")
        return expected_lens.tolist()

    def best(self, place: int) -> MemberDraft:
        return self._read(place, self._best(self.handle, place))

    def calibrate(self, place: int, member: int, draft: Draft) -> MemberDraft:
        references = tuple(self._read(place, lookup).token_ids for lookup in range(len(self._lookups)))
        price = self._demands[place].terms.row_price
        return MemberDraft.of(member, draft, self._survival[member], self._consensus, references, price)

    def best_drafts(self, places: Sequence[int]) -> list[tuple[int, Draft]]:
        num, found = len(places), self._found
        found.make_room(num, self._batch.drafts.stride)
        wanted, members = array("q", places), array("q", [0]) * num
        rooms = [address(room) for room in (found.token_ids, found.confidences, found.lens, members)]
        if self._best_drafts(self.handle, num, address(wanted), found.stride, *rooms):
            raise MemoryError(f"no memory for {num} drafts")
        drafts = found.read([self._demands[place].request_id for place in places])
        return list(zip(members.tolist(), drafts, strict=True))

    def spliced(self, place: int, draft: MemberDraft) -> Draft:
        demand, num = self._demands[place], len(draft.token_ids)
        spare = max(0, demand.num_tokens - num)
        token_ids = array("i", draft.token_ids) + array("i", [0]) * spare
        confidences = array("d", draft.survival) + array("d", [0.0]) * spare
        kept = self._splice(self.handle, place, num, address(token_ids), address(confidences))
        if kept < 0:
            raise MemoryError(f"no memory for a draft of {demand.num_tokens} tokens")
        return Draft(demand.request_id, tuple(token_ids[:kept]), tuple(confidences[:kept]))

    def learn(self, draft: MemberDraft, token_ids: Sequence[int]) -> None:
        draft.record(token_ids, self._survival[draft.member], self._consensus)
        self._due_at[-1] = self._consensus.num_until_due
        self._learn_due()

    def _read(self, place: int, member: int) -> MemberDraft:
        found = _NativeDraft()
        self._draft(self.handle, place, member, ctypes.addressof(found))
        num = found.num
        compared = ComparedDraft(tuple(found.conditional[:num]), tuple(found.cases[:num]), tuple(found.survival[:num]))
        token_ids, confidences = tuple(found.token_ids[:num]), tuple(found.confidences[:num])
        return MemberDraft(member, token_ids, confidences, compared, found.num_paying, found.expected_len)

    def _learn_due(self) -> None:
        """Takes the pending trials of members, and of their comparison."""
        due, last = self._due(self.handle), len(self._lookups)
        for number in range(last + 1) if due else ():
            if due >> number & 1:
                trials = _Trials()
                self._take(self.handle, number, ctypes.addressof(trials))
                at, conditional, right = (
                    _copied(trials.num, one) for one in (trials.at, trials.conditional, trials.was_right)
                )
                if number < last:
                    self._survival[number].record_all(trials.num_records, at, conditional, right.astype(np.bool_))
                    self._due_at[number] = self._survival[number].num_due
                else:
                    self._consensus.learn(at, conditional, right.astype(np.bool_))
                    self._due_at[number] = self._consensus.num_until_due


def _copied(num: int, at: Any) -> NDArray[Any]:
    return np.ctypeslib.as_array(at, (num,)).copy() if num else np.zeros(0, at._type_)
