"""Drafts of the target engine's own proposer: EAGLE-3 and MTP heads, DFlash and draft models that vLLM loads."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Protocol, runtime_checkable

from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft
from drafters.session import request_id_of

_REMEMBERED = 4096  # draft tokens, of which half are forgotten then


@runtime_checkable
class Proposing(Protocol):
    """A target that hosts a proposer of its own."""

    def draft(self, num_tokens: int) -> Mapping[str, Sequence[int]]:
        """Greedy drafts of at most ``num_tokens`` after the tokens that the last pass sampled, for its requests; none when
        they were asked for before."""


class EngineProposals:
    """``Drafter`` in the target's process, stepped between passes: its drafts are for the requests of the last pass. vLLM
    gives no confidences, so that of a token is the share of draft tokens behind right ones that were right so far."""

    def __init__(self, engine: Proposing) -> None:
        self._engine = engine
        self._num_tokens: dict[str, int] = {}  # committed, of each request
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}  # with the number of committed tokens before each
        self._num_right, self._num_tried = 1.0, 2.0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.release(request_id)
        self._num_tokens[request_id] = len(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        base_len, draft = self._drafts.get(request_id, (0, ()))
        if base_len == self._num_tokens[request_id]:
            self._judge(draft, token_ids)
        self._num_tokens[request_id] += len(token_ids)

    def _judge(self, draft: Sequence[int], token_ids: Sequence[int]) -> None:
        pairs = list(zip(draft, token_ids, strict=False))
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._num_right += num_right
        self._num_tried += num_right + (num_right < len(pairs))
        if self._num_tried > _REMEMBERED:
            self._num_right, self._num_tried = self._num_right / 2, self._num_tried / 2

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        wanted = max((demand.num_tokens for demand in demands), default=0)
        if wanted and (drafts := self._engine.draft(wanted)):
            self._drafts = {
                name: (num_tokens, tuple(drafts[request_id]))
                for name, num_tokens in self._num_tokens.items()
                if (request_id := request_id_of(name)) in drafts
            }
        return [self._draft(demand) for demand in demands]

    def _draft(self, demand: Demand) -> Draft:
        base_len, draft = self._drafts.get(demand.request_id, (0, ()))
        num_ahead = len(demand.ahead)
        fits = base_len == self._num_tokens[demand.request_id] and draft[:num_ahead] == demand.ahead
        token_ids = draft[num_ahead : num_ahead + demand.num_tokens] if fits else ()
        return Draft(demand.request_id, token_ids, (self._num_right / self._num_tried,) * len(token_ids))

    def release(self, request_id: str) -> None:
        self._num_tokens.pop(request_id, None)
        self._drafts.pop(request_id, None)

    def check_integrity(self) -> None:
        assert self._drafts.keys() <= self._num_tokens.keys(), "drafts are kept of requests that ended"
