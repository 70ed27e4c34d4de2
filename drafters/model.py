"""Drafting with a causal model, token by token for all requests at once; alone, or as the verifier of a chain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from cluster.messages import LevelReport, Verified
from cluster.sampling_params import SamplingParams
from drafters.draft_stops import DraftStops
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.similarity import Comparison, DistributionRows, SampledRounds
from drafters.small_model import Question, SmallModel
from engine.acceptance import common_prefix_len
from engine.sampling import Chosen
from profiler.calibration import Calibration, TemperatureScaling
from router.assignment import NO_POSITIONS, Positions
from router.drafter.chains import LearnedWindow


@dataclass(slots=True)
class _PartialDraft:
    """A draft under construction. ``num_missing`` 0: it is complete."""

    demand: Demand
    num_missing: int
    survival: float = 1.0
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    runners_up: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def ahead(self) -> tuple[int, ...]:
        return (*self.demand.ahead, *self.token_ids)


class ModelDrafter:
    """Samples the model's continuation with the target's noise and parameters.

    With ``proposers`` it is a chain: the smaller drafter of a request proposes, the model verifies. A proposed token is
    right if it equals the model's choice: a chain saves passes and changes no draft. All requests share the model's passes.

    Args:
        proposers: by pool name; a proposer with proposers may be verified in turn.
        min_survival: of uncalibrated confidences; a draft ends after the token that takes its survival below this.
        calibration: of the returned confidences, by position behind the last commit.
        clock: times the passes; None: they are not timed, drafting costs nothing, and windows of proposers are not learned.
    """

    def __init__(
        self,
        model: SmallModel,
        proposers: Mapping[str, Drafter] | None = None,
        *,
        min_survival: float = 0.0,
        calibration: Calibration | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._model = model
        self._proposers = dict(proposers or {})
        self._windows = {proposer: LearnedWindow() for proposer in self._proposers}
        self._step_s: dict[str, float] = {}  # of a token of the last proposals, by proposer
        self._new: set[str] = set()  # requests that their proposer has not drafted for
        self.min_survival = min_survival
        self._calibration = calibration
        self._scalings: dict[str, TemperatureScaling] = {}  # by request
        self._clock = clock
        self._stops = DraftStops()
        self._proposers_of: dict[str, tuple[str, ...]] = {}  # by request, smallest first
        self._positions: dict[str, Positions] = {}  # of the drafts of each proposer, since the last report
        self._num_proposed: dict[str, tuple[int, int]] = {}  # tokens demanded of each proposer and proposed, since then
        self._watched: tuple[str, DistributionRows] | None = None  # the request whose distributions are kept
        self._sampled = {proposer: SampledRounds() for proposer in self._proposers}
        # By proposer, since the last report: the number of compared tokens, and the sum of their overlaps.
        self._overlaps: dict[str, tuple[int, float]] = {}
        self._num_passes = self._num_rows = 0  # since the last report
        self._num_lost = 0  # as of the last report
        self._num_timed, self._busy_s = 0, 0.0  # passes without comparisons, which are slower, and their seconds

    @property
    def capabilities(self) -> Capabilities:
        chain = self if self._proposers else None
        return Capabilities(token_by_token=self, chain=chain, forks=self, distributions=self, stops=True)

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._leave(request_id)
        self._stops.forget(request_id)
        self._model.open(request_id, token_ids, prompt_len, sampling, salt)
        if self._calibration is not None:
            self._scalings[request_id] = self._calibration.of(sampling.temperature)

    def set_proposers(self, request_id: str, proposers: Sequence[str]) -> bool:
        wanted = tuple(proposers)
        if wanted == self._proposers_of.get(request_id, ()):
            return True
        self._leave(request_id)
        if not wanted or wanted[-1] not in self._proposers:
            return not wanted
        proposer = self._proposers[wanted[-1]]
        chain = proposer.capabilities.chain
        if len(wanted) > 1 and chain is None:
            return False
        proposer.open(request_id, *self._model.opening(request_id))
        self._proposers_of[request_id] = wanted
        self._new.add(request_id)
        if chain is not None and not chain.set_proposers(request_id, wanted[:-1]):
            self._leave(request_id)
            return False
        return True

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        proposer = self._proposer_of(request_id)
        if proposer is not None:
            proposer.extend(request_id, token_ids)
        self._stops.extend(request_id, token_ids)
        self._model.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        """As ``Drafter.propose``. Drafts of a request with much missing context are empty until it has caught up, one pass
        per batch; those of a request with tokens unknown to the model always."""
        drafts = [_PartialDraft(demand, self._draft_len(demand)) for demand in demands]
        wanted = [draft for draft in drafts if draft.num_missing]
        questions = [Question(draft.demand.request_id, draft.ahead) for draft in wanted]
        for indices in self._model.parts([(q, draft.num_missing) for q, draft in zip(questions, wanted, strict=True)]):
            ready = self._model.catch_up([questions[i] for i in indices])
            part = [wanted[i] for i, is_ready in zip(indices, ready, strict=True) if is_ready]
            self._draft_part(part)
        for draft in drafts:
            self._stops.note_draft(draft.demand, draft.token_ids, draft.confidences)
        return [self._finished(draft) for draft in drafts]

    def propose_watched(self, demands: Sequence[Demand], request_id: str) -> tuple[list[Draft], Any]:
        self._watched = request_id, (rows := DistributionRows())
        try:
            return self.propose(demands), rows.all()
        finally:
            self._watched = None

    def fork(self, request_id: str, branch_id: str, ahead: Sequence[int], num_more: int) -> bool:
        """As ``Forks.fork``. A branch has no proposers: it is drafted for by the model alone."""
        is_forked = self._model.can_read(request_id, ahead) and self._model.fork(request_id, branch_id, ahead, num_more)
        if is_forked and request_id in self._scalings:
            self._scalings[branch_id] = self._scalings[request_id]
        return is_forked

    def adopt(self, request_id: str, branch_id: str) -> None:
        self._scalings.pop(branch_id, None)
        self._model.adopt(request_id, branch_id)

    def choose_at_each(self, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
        questions = [Question(demand.request_id, drafts=demand.ahead[:-1]) for demand in demands]
        return [
            None if chosen is None else Draft(demand.request_id, chosen.token_ids, chosen.confidences)
            for demand, chosen in zip(demands, self._model.choose_within(questions, max_rows), strict=True)
        ]

    def release(self, request_id: str) -> None:
        self._leave(request_id)
        self._stops.forget(request_id)
        self._scalings.pop(request_id, None)
        self._model.release(request_id)

    def take_levels(self, name: str) -> list[LevelReport]:
        reports = []
        if self._num_passes:
            num_lost = self._model.num_lost - self._num_lost
            verified = tuple(
                Verified(
                    proposer,
                    positions.num_reached,
                    positions.num_right,
                    *self._num_proposed[proposer],
                    *self._overlaps.get(proposer, (0, 0.0)),
                )
                for proposer, positions in self._positions.items()
            )
            busy_s = self._busy_s * self._num_passes / max(1, self._num_timed)
            reports.append(LevelReport(name, self._num_passes, self._num_rows, busy_s, num_lost, verified))
        self._num_passes = self._num_rows = self._num_timed = 0
        self._num_lost, self._busy_s = self._model.num_lost, 0.0
        self._positions, self._num_proposed, self._overlaps = {}, {}, {}
        for proposer, drafter in self._proposers.items():
            if drafter.capabilities.chain is not None:
                reports += drafter.capabilities.chain.take_levels(proposer)
        return reports

    def check_integrity(self) -> None:
        self._model.check_integrity()
        for proposer in self._proposers.values():
            proposer.check_integrity()

    def _proposer_of(self, request_id: str) -> Drafter | None:
        proposers = self._proposers_of.get(request_id)
        return self._proposers[proposers[-1]] if proposers else None

    def _leave(self, request_id: str) -> None:
        proposer = self._proposer_of(request_id)
        if proposer is not None:
            proposer.release(request_id)
            del self._proposers_of[request_id]
            self._new.discard(request_id)

    def _draft_len(self, demand: Demand) -> int:
        ended = any(self._model.ends(demand.request_id, token_id) for token_id in demand.ahead)
        if ended or not self._model.can_read(demand.request_id, demand.ahead):
            return 0
        free_len = self._model.max_len - self._model.committed_len(demand.request_id) - len(demand.ahead)
        return max(0, min(demand.num_tokens, free_len))

    def _finished(self, draft: _PartialDraft) -> Draft:
        confidences = tuple(draft.confidences)
        scaling = self._scalings.get(draft.demand.request_id)
        if scaling is not None and confidences:
            confidences = scaling.conditional(confidences, first=len(draft.demand.ahead))
        return Draft(draft.demand.request_id, tuple(draft.token_ids), confidences, tuple(draft.runners_up))

    def _draft_part(self, part: Sequence[_PartialDraft]) -> None:
        """Step by step, while a step pays."""
        going, num_steps = list(part), 0
        while going:
            self._draft_round(going)
            num_steps += 1
            begun = [draft for draft in part if draft.token_ids]
            is_open = [draft.num_missing > 0 for draft in begun]
            if not any(is_open):
                return
            demands, confidences = [draft.demand for draft in begun], [draft.confidences for draft in begun]
            goes_on = self._stops.continuing(demands, confidences, is_open, num_steps)
            going = [draft for draft, one in zip(begun, goes_on, strict=True) if one]

    def _draft_round(self, part: Sequence[_PartialDraft]) -> None:
        """One batch per proposer, then one pass of the model."""
        asked = {}
        for draft in part:
            if proposers := self._proposers_of.get(draft.demand.request_id):
                asked[draft.demand.request_id] = min(self._windows[proposers[-1]].window, draft.num_missing - 1)
        compared: dict[str, Comparison] = {}
        proposed = self._proposals(part, asked, compared) if asked else {}
        questions = [
            Question(draft.demand.request_id, draft.ahead, proposed.get(draft.demand.request_id, ())) for draft in part
        ]
        busy_s, num_timed, num_rows = self._busy_s, self._num_timed, self._num_rows
        answers = self._choose(questions, max(draft.demand.num_runners_up for draft in part), compared)
        has_caught_up = self._num_rows - num_rows > sum(2 + len(question.drafts) for question in questions)
        judged: dict[str, list[tuple[int, int]]] = {}  # tokens asked and right, by proposer
        for draft, question, chosen in zip(part, questions, answers, strict=True):
            num_right = common_prefix_len(question.drafts, chosen.token_ids)
            if question.request_id in proposed:
                proposer, num_asked = self._proposers_of[question.request_id][-1], asked[question.request_id]
                self._record(proposer, num_asked, len(question.drafts), num_right)
                if question.request_id in compared:
                    found = compared[question.request_id].found(min(num_right + 1, len(question.drafts)))
                    num_before, sum_before = self._overlaps.get(proposer, (0, 0.0))
                    self._overlaps[proposer] = num_before + len(found), sum_before + sum(found)
                if question.drafts:  # else it has not caught up
                    judged.setdefault(proposer, []).append((num_asked, num_right))
            num_before = len(draft.token_ids)
            self._add(draft, chosen, num_right + 1)
            if self._watched is not None and question.request_id == self._watched[0]:
                self._watched[1].keep(len(draft.token_ids) - num_before)
        for proposer, drafts in judged.items() if self._num_timed > num_timed and not has_caught_up else ():
            if (step_s := self._step_s.pop(proposer, None)) is not None:
                self._windows[proposer].learn(drafts, step_s, self._busy_s - busy_s)

    def _proposals(
        self, part: Sequence[_PartialDraft], asked: Mapping[str, int], compared: dict[str, Comparison]
    ) -> dict[str, tuple[int, ...]]:
        """Proposed tokens that the model can choose, by request. Adds a comparison of each sampled proposer to
        ``compared``."""
        by_proposer: dict[str, list[Demand]] = {}
        for draft in part:
            request_id = draft.demand.request_id
            if asked.get(request_id, 0) > 0:
                demand = Demand(request_id, asked[request_id], draft.ahead)
                by_proposer.setdefault(self._proposers_of[request_id][-1], []).append(demand)
        proposed: dict[str, tuple[int, ...]] = {}
        for name, demands in by_proposer.items():
            start_s = self._clock() if self._clock is not None else 0.0
            drafts = self._drafts_of(name, demands, compared)
            requests = {demand.request_id for demand in demands}
            # Others read their context first, or keep distributions.
            if self._clock is not None and requests.isdisjoint(self._new | compared.keys()):
                self._step_s[name] = (self._clock() - start_s) / max(demand.num_tokens for demand in demands)
            self._new -= requests
            proposed |= {draft.request_id: self._model.choosable(draft.token_ids) for draft in drafts}
        return proposed

    def _drafts_of(self, name: str, demands: Sequence[Demand], compared: dict[str, Comparison]) -> list[Draft]:
        """As ``Drafter.propose`` of a proposer."""
        proposer, index = self._proposers[name], self._sampled[name].next(len(demands))
        known = proposer.capabilities.distributions
        if known is None or index is None:
            return proposer.propose(demands)
        drafts, distributions = known.propose_watched(demands, demands[index].request_id)
        if distributions is not None:
            compared[demands[index].request_id] = Comparison(distributions)
        return drafts

    def _choose(
        self, questions: Sequence[Question], num_runners_up: int, compared: Mapping[str, Comparison]
    ) -> list[Chosen]:
        watched = [(i, compared[q.request_id].note) for i, q in enumerate(questions) if q.request_id in compared]
        if self._watched is not None:
            watched += [(i, self._watched[1].note) for i, q in enumerate(questions) if q.request_id == self._watched[0]]
        num_rows = self._model.num_rows
        start_s = self._clock() if self._clock is not None else 0.0
        answers = self._model.choose(questions, num_runners_up, watched)
        num_rows = self._model.num_rows - num_rows
        if self._clock is not None and not watched:
            seconds = self._clock() - start_s
            self._num_timed += 1
            self._busy_s += seconds
            if num_rows == sum(1 + len(question.drafts) for question in questions):  # nothing was caught up with
                self._stops.note_step(len(questions), seconds)
        self._num_passes += 1
        self._num_rows += num_rows
        return answers

    def _record(self, proposer: str, num_demanded: int, num_proposed: int, num_right: int) -> None:
        positions = self._positions.get(proposer, NO_POSITIONS)
        self._positions[proposer] = positions.plus(num_right, num_right < num_demanded)
        demanded_before, proposed_before = self._num_proposed.get(proposer, (0, 0))
        self._num_proposed[proposer] = demanded_before + num_demanded, proposed_before + num_proposed

    def _add(self, draft: _PartialDraft, chosen: Chosen, num_tokens: int) -> None:
        """Appends up to ``num_tokens`` chosen tokens, until the draft is complete."""
        if not chosen.token_ids:  # every token is masked there, and the target will find the same
            draft.num_missing = 0
        rows = zip_longest(chosen.token_ids[:num_tokens], chosen.confidences[:num_tokens], chosen.runners_up[:num_tokens])
        for token_id, confidence, runners_up in rows:
            if not draft.num_missing:
                break
            if runners_up is not None and draft.demand.num_runners_up:  # others of the batch may ask for them
                draft.runners_up.append(runners_up[: draft.demand.num_runners_up])
            draft.token_ids.append(token_id)
            draft.confidences.append(confidence)
            draft.num_missing -= 1
            draft.survival *= confidence
            is_doubtful = draft.survival < self.min_survival or confidence < draft.demand.terms.min_confidence
            if is_doubtful or self._model.ends(draft.demand.request_id, token_id):
                draft.num_missing = 0
