"""A chain drafter with the same proposers for every request: a ``Drafter`` for contract tests."""

from collections.abc import Sequence

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft, Drafter


class WithProposers:
    """``drafter`` behind ``proposers``, smallest first."""

    capabilities = Capabilities()

    def __init__(self, drafter: Drafter, proposers: Sequence[str]) -> None:
        self._drafter = drafter
        self._proposers = tuple(proposers)

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._drafter.open(request_id, token_ids, prompt_len, sampling, salt)
        chain = self._drafter.capabilities.chain
        assert chain is not None
        assert chain.set_proposers(request_id, self._proposers)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._drafter.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return self._drafter.propose(demands)

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)

    def check_integrity(self) -> None:
        self._drafter.check_integrity()
