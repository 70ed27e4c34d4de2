"""A model that drafts alone, or verifies what smaller drafters propose: the last level of a chain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.messages import LevelReport, Verified
from cluster.types import SamplingParams
from drafters.model import PartialDraft, check_min_confidence, foresee, grow
from drafters.protocol import Chaining, Demand, Draft, Drafter, Stopping
from drafters.small_model import Question, SmallModel
from engine.acceptance import count_accepted
from engine.sampling import Chosen
from router.assignment import NO_POSITIONS, Positions
from router.chains import PROPOSAL_LEN


class ChainedModel:
    """Drafts exactly what ``verifier`` alone would draft, with or without a proposer per request.

    By the acceptance rule with the verifier's own logits, a proposer's tokens that equal the verifier's are right, and the
    verifier's next token comes free. So a chain saves passes and changes no draft. All requests share the verifier's passes,
    whatever their proposers.

    Args:
        proposers: by pool name; a chained proposer may have proposers of its own.
        proposal_len: maximum tokens of one proposal.
        min_confidence, min_survival: of the verifier, as in ``ModelDrafter``.
        clock: times the passes; None: they are not timed.
    """

    def __init__(
        self,
        verifier: SmallModel,
        proposers: Mapping[str, Drafter],
        proposal_len: int = PROPOSAL_LEN,
        min_confidence: float = 0.0,
        min_survival: float = 0.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        check_min_confidence(min_confidence)
        check_min_confidence(min_survival, "min_survival")
        self._verifier = verifier
        self._proposers = dict(proposers)
        self._proposal_len = proposal_len
        self._min_confidence = min_confidence
        self._min_survival = min_survival
        self._clock = clock
        self._led: dict[str, tuple[str, ...]] = {}  # request -> who rides ahead, smallest first
        self._positions: dict[str, Positions] = {}  # of the drafts of each proposer, since the last report
        self._proposed: dict[str, tuple[int, int]] = {}  # of each: tokens that it was asked for, and that it proposed
        self._num_passes = self._num_rows = self._num_lost = 0  # since the last report, but for num_lost
        self._busy_s = 0.0

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._leave(request_id)
        self._verifier.open(request_id, token_ids, prompt_len, sampling)

    def lead(self, request_id: str, proposers: Sequence[str]) -> bool:
        wanted = tuple(proposers)
        if wanted == self._led.get(request_id, ()):
            return True
        self._leave(request_id)
        if not wanted or wanted[-1] not in self._proposers:
            return not wanted
        proposer = self._proposers[wanted[-1]]
        if len(wanted) > 1 and not isinstance(proposer, Chaining):
            return False
        proposer.open(request_id, *self._verifier.opening(request_id))
        self._led[request_id] = wanted
        if isinstance(proposer, Chaining) and not proposer.lead(request_id, wanted[:-1]):
            self._leave(request_id)
            return False
        return True

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        proposer = self._proposer_of(request_id)
        if proposer is not None:
            proposer.extend(request_id, token_ids)
        self._verifier.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return grow(self._verifier, demands, self._round, self._min_survival)

    @property
    def stopping(self) -> Stopping:
        return Stopping(self._min_confidence, self._min_survival)

    def foresee(self, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
        return foresee(self._verifier, demands, max_rows)

    def release(self, request_id: str) -> None:
        self._leave(request_id)
        self._verifier.release(request_id)

    def take_levels(self, name: str) -> list[LevelReport]:
        num_lost = self._verifier.num_lost - self._num_lost
        verified = tuple(
            Verified(one, seen.num_reached, seen.num_right, *self._proposed[one]) for one, seen in self._positions.items()
        )
        found = []
        if self._num_passes:
            found.append(LevelReport(name, self._num_passes, self._num_rows, self._busy_s, num_lost, verified))
        self._num_passes = self._num_rows = 0
        self._num_lost, self._busy_s = self._verifier.num_lost, 0.0
        self._positions, self._proposed = {}, {}
        for below, drafter in self._proposers.items():
            if isinstance(drafter, Chaining):
                found += drafter.take_levels(below)
        return found

    def check_integrity(self) -> None:
        self._verifier.check_integrity()
        for proposer in self._proposers.values():
            proposer.check_integrity()

    def _proposer_of(self, request_id: str) -> Drafter | None:
        led = self._led.get(request_id)
        return None if led is None else self._proposers[led[-1]]

    def _leave(self, request_id: str) -> None:
        proposer = self._proposer_of(request_id)
        if proposer is not None:
            proposer.release(request_id)
            del self._led[request_id]

    def _round(self, part: Sequence[PartialDraft]) -> None:
        """One batch per proposer, then one pass of the verifier, which adds the last token of a draft itself."""
        asked: dict[str, list[Demand]] = {}
        for draft in part:
            request_id, num_tokens = draft.demand.request_id, min(self._proposal_len, draft.num_missing - 1)
            if num_tokens > 0 and request_id in self._led:
                demand = Demand(request_id, num_tokens, draft.question.ahead)
                asked.setdefault(self._led[request_id][-1], []).append(demand)
        proposed: dict[str, tuple[int, ...]] = {}
        for name, demands in asked.items():
            proposed.update((draft.request_id, draft.token_ids) for draft in self._proposers[name].propose(demands))
        questions = [
            replace(draft.question, drafts=self._verifier.readable(proposed.get(draft.demand.request_id, ())))
            for draft in part
        ]
        answers = self._timed(questions)
        for draft, question, chosen in zip(part, questions, answers, strict=True):
            num_right = count_accepted(question.drafts, chosen)
            request_id = draft.demand.request_id
            if request_id in proposed:
                name, num_asked = self._led[request_id][-1], min(self._proposal_len, draft.num_missing - 1)
                seen = self._positions.get(name, NO_POSITIONS)
                self._positions[name] = seen.plus(num_right, num_right < num_asked)
                asked_before, proposed_before = self._proposed.get(name, (0, 0))
                self._proposed[name] = asked_before + num_asked, proposed_before + len(question.drafts)
            draft.add(chosen, self._verifier, self._min_confidence, num_right + 1)

    def _timed(self, questions: Sequence[Question]) -> list[Chosen]:
        """The verifier's pass for all requests of the part."""
        num_rows = self._verifier.num_rows
        start_s = self._clock() if self._clock is not None else 0.0
        answers = self._verifier.choose(questions)
        self._busy_s += self._clock() - start_s if self._clock is not None else 0.0
        self._num_passes += 1
        self._num_rows += self._verifier.num_rows - num_rows
        return answers
