"""A chain: a bigger small model first verifies what a smaller drafter proposes (SpecRouter's chains)."""

from collections.abc import Sequence

from cluster.types import SamplingParams
from drafters.chained import LedModel
from drafters.protocol import Demand, Draft, Drafter
from drafters.small_model import SmallModel
from router.chains import PROPOSAL_LEN

_PROPOSER = ("proposer",)


class ChainDrafter:
    """A model that is always led by the same proposer, which may itself be a chain. Arguments are as in ``LedModel``."""

    def __init__(
        self,
        proposer: Drafter,
        verifier: SmallModel,
        proposal_len: int = PROPOSAL_LEN,
        min_confidence: float = 0.0,
        min_survival: float = 0.0,
    ) -> None:
        self._led = LedModel(verifier, dict.fromkeys(_PROPOSER, proposer), proposal_len, min_confidence, min_survival)

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._led.open(request_id, token_ids, prompt_len, sampling)
        self._led.lead(request_id, _PROPOSER)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._led.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return self._led.propose(demands)

    def release(self, request_id: str) -> None:
        self._led.release(request_id)

    def check_integrity(self) -> None:
        self._led.check_integrity()
