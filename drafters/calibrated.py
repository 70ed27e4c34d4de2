"""Wraps a drafter with calibrated confidences; drafts are unchanged."""

from collections.abc import Sequence
from dataclasses import replace

from cluster.messages import LevelReport
from cluster.types import SamplingParams
from drafters.chained import ChainedModel
from drafters.protocol import Demand, Draft, Drafter, Foreseeing, Stopping
from profiler.calibration import TemperatureScaling


class CalibratedDrafter:
    """A drafter whose confidences were calibrated on verified drafts (``profiler.calibration``).

    Temperatures are by position behind the last commit, tokens drafted ahead included.
    """

    def __init__(self, drafter: Drafter, scaling: TemperatureScaling) -> None:
        self._drafter = drafter
        self._scaling = scaling

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._drafter.open(request_id, token_ids, prompt_len, sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._drafter.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = self._drafter.propose(demands)
        return [
            replace(draft, confidences=self._scaling.conditional(draft.confidences, first=len(demand.ahead)))
            if draft.confidences
            else draft
            for demand, draft in zip(demands, drafts, strict=True)
        ]

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)

    def check_integrity(self) -> None:
        self._drafter.check_integrity()


class CalibratedForeseeing(CalibratedDrafter):
    """The same for a token-by-token drafter, which stops by its own uncalibrated confidences."""

    def __init__(self, drafter: Foreseeing, scaling: TemperatureScaling) -> None:
        super().__init__(drafter, scaling)
        self._foreseeing = drafter

    @property
    def stopping(self) -> Stopping:
        return self._foreseeing.stopping

    def foresee(self, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
        return self._foreseeing.foresee(demands, max_rows)


class CalibratedChaining(CalibratedForeseeing):
    """The same for a drafter with proposers."""

    def __init__(self, drafter: ChainedModel, scaling: TemperatureScaling) -> None:
        super().__init__(drafter, scaling)
        self._chaining = drafter

    def lead(self, request_id: str, proposers: Sequence[str]) -> bool:
        return self._chaining.lead(request_id, proposers)

    def take_levels(self, name: str) -> list[LevelReport]:
        return self._chaining.take_levels(name)
