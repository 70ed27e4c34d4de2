"""A simulated cascade: the live one over simulated members, each with its agreement with each answer and its draft times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drafters.cascade import CascadeDrafter, CascadeMember
from drafters.protocol import Capabilities, Demand, Draft
from simulator.drafter import AgreementDrafter
from simulator.text import Script
from simulator.timing import DraftTimer


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """``name``: of its agreement and draft times. ``cost``: as of `drafters.cascade.CascadeMember`, 0 of a lookup."""

    name: str
    cost: float


class SimulatedCascade:
    """A `Drafter` that answers at once. ``seconds`` is what its last batch would have taken: the drafts of the members that
    it queried, one after the other. Splices take none, since live lookups make them all in one call.

    Members that are wrong at the same place draft the same wrong token there, so that their agreement says less than live.

    Args:
        few_trials: as of `CascadeDrafter`.
        now: virtual time.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        name: str,
        members: Sequence[MemberSpec],
        timer: DraftTimer,
        scripts: Mapping[str, Script],
        now: Callable[[], float],
        few_trials: bool,
    ) -> None:
        self.name = name
        self.seconds = 0.0
        self.num_extended = 0
        self._under_way_s = 0.0  # of the batch that is drafted
        drafters = {one: _Member(one, timer, scripts, self._took) for one in members}
        self._cascade = CascadeDrafter(
            [CascadeMember(one.name, member, one.cost, splices=one.cost == 0.0) for one, member in drafters.items()],
            lambda: now() + self._under_way_s,
            few_trials=few_trials,
        )
        self.open, self.release = self._cascade.open, self._cascade.release
        self.check_integrity = self._cascade.check_integrity

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.num_extended += len(token_ids)
        self._cascade.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = self._cascade.propose(demands)
        self.seconds, self._under_way_s = self._under_way_s, 0.0
        return drafts

    def _took(self, seconds: float) -> None:
        self._under_way_s += seconds


class _Member(AgreementDrafter):
    """Reports the time of its drafts, which are made at once; of a lookup those that are no splices."""

    def __init__(
        self, spec: MemberSpec, timer: DraftTimer, scripts: Mapping[str, Script], took: Callable[[float], None]
    ) -> None:
        super().__init__(spec.name, timer, scripts)
        self._has_model = spec.cost > 0.0
        self._took = took

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = super().propose(demands)
        if self._has_model or not any(demand.ahead for demand in demands):
            self._took(self.seconds)
        return drafts

    def _ends_by_step(self, demands: Sequence[Demand]) -> bool:
        return False  # of blocks and lookups
