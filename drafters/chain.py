"""A chain: a bigger small model first verifies what a smaller drafter proposes (SpecRouter's chains)."""

from collections.abc import Sequence
from dataclasses import replace

from cluster.types import SamplingParams
from drafters.model import Growing, check_min_confidence, grow
from drafters.protocol import Demand, Draft, Drafter
from drafters.small_model import SmallModel
from engine.acceptance import count_accepted


class ChainDrafter:
    """Hands out exactly what ``verifier`` alone would draft, in fewer passes of it.

    By rule 1 with the verifier's own logits: of the proposer's tokens those that equal the verifier's are right, and the
    verifier's next token comes free. The proposer may itself be a chain.

    Args:
        proposal_len: most tokens that the proposer is asked for at a time.
        min_confidence: of the verifier, as in ``ModelDrafter``.
    """

    def __init__(self, proposer: Drafter, verifier: SmallModel, proposal_len: int = 4, min_confidence: float = 0.0) -> None:
        check_min_confidence(min_confidence)
        self._proposer = proposer
        self._verifier = verifier
        self._proposal_len = proposal_len
        self._min_confidence = min_confidence

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._proposer.open(request_id, token_ids, prompt_len, sampling)
        self._verifier.open(request_id, token_ids, prompt_len, sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._proposer.extend(request_id, token_ids)
        self._verifier.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return grow(self._verifier, demands, self._round)

    def release(self, request_id: str) -> None:
        self._proposer.release(request_id)
        self._verifier.release(request_id)

    def check_integrity(self) -> None:
        self._proposer.check_integrity()
        self._verifier.check_integrity()

    def _round(self, part: Sequence[Growing]) -> None:
        """One batch of the proposer, one pass of the verifier. The last token of a draft is the verifier's own: it needs no
        proposal."""
        asked = [
            Demand(draft.demand.request_id, min(self._proposal_len, draft.num_missing - 1), draft.question.ahead)
            for draft in part
            if draft.num_missing > 1
        ]
        proposed = {draft.request_id: draft.token_ids for draft in self._proposer.propose(asked)} if asked else {}
        questions = [
            replace(draft.question, drafts=self._verifier.readable(proposed.get(draft.demand.request_id, ())))
            for draft in part
        ]
        for draft, question, chosen in zip(part, questions, self._verifier.choose(questions), strict=True):
            num_right = count_accepted(question.drafts, chosen)
            draft.add(chosen, self._verifier, self._min_confidence, num_right + 1)
