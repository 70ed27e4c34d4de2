"""Drafting with any causal model of the target's vocabulary, token by token for all requests at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.protocol import Demand, Draft, Stopping
from drafters.small_model import Question, SmallModel
from engine.sampling import Chosen


@dataclass(slots=True)
class PartialDraft:
    """A draft under construction."""

    demand: Demand
    num_missing: int  # 0: it is done
    min_survival: float = 0.0  # of all its tokens together, by their confidences; below, it is done
    survival: float = 1.0
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def question(self) -> Question:
        return Question(self.demand.request_id, (*self.demand.ahead, *self.token_ids))

    def add(self, chosen: Chosen, model: SmallModel, min_confidence: float, num_tokens: int = 1) -> None:
        """Appends up to ``num_tokens`` chosen tokens, until the draft is complete, the request ends, or confidence is too
        low.
        """
        if not chosen.token_ids:  # every token is masked there, and the target will find the same
            self.num_missing = 0
        for token_id, confidence in zip(chosen.token_ids[:num_tokens], chosen.confidences, strict=False):
            if confidence < min_confidence:
                self.num_missing = 0
            if not self.num_missing:
                break
            self.token_ids.append(token_id)
            self.confidences.append(confidence)
            self.num_missing -= 1
            self.survival *= confidence
            if self.survival < self.min_survival or model.ends(self.demand.request_id, token_id):
                self.num_missing = 0

    def draft(self) -> Draft:
        return Draft(self.demand.request_id, tuple(self.token_ids), tuple(self.confidences))


def grow(
    model: SmallModel,
    demands: Sequence[Demand],
    one_round: Callable[[Sequence[PartialDraft]], None],
    min_survival: float = 0.0,
) -> list[Draft]:
    """Drafts of a batch, extended by repeated ``one_round``, in parts that the model's cache holds at once.

    A demand beyond the model's length is cut. A request with much missing context (a long prompt, just opened) gets an empty
    draft until it has caught up, one pass per batch, so that others need not wait. A request with tokens unknown to the
    model gets none.
    """
    growing = []
    for demand in demands:
        room = model.max_len - model.committed_len(demand.request_id) - len(demand.ahead)
        ended = any(model.ends(demand.request_id, token_id) for token_id in demand.ahead)
        hopeless = ended or not model.can_read(demand.request_id, demand.ahead)
        growing.append(PartialDraft(demand, 0 if hopeless else max(0, min(demand.num_tokens, room)), min_survival))
    wanted = [draft for draft in growing if draft.num_missing]
    for indices in model.parts([(draft.question, draft.num_missing) for draft in wanted]):
        part = [wanted[i] for i in indices]
        ready = model.catch_up([draft.question for draft in part])
        part = [draft for draft, is_ready in zip(part, ready, strict=True) if is_ready]
        while part:
            one_round(part)
            part = [draft for draft in part if draft.num_missing]
    return [draft.draft() for draft in growing]


def foresee(model: SmallModel, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
    """``Foreseeing.foresee`` of a model that drafts what it would choose."""
    questions = [Question(demand.request_id, drafts=demand.ahead[:-1]) for demand in demands]
    return [
        None if chosen is None else Draft(demand.request_id, chosen.token_ids, chosen.confidences)
        for demand, chosen in zip(demands, model.foresee(questions, max_rows), strict=True)
    ]


def check_min_confidence(value: float, name: str = "min_confidence") -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidField(name, value, "must be at least 0 and less than 1")


class ModelDrafter:
    """Samples the model's continuation with the target's noise and parameters; the target as its own drafter is always
    right.

    Args:
        min_confidence: a draft ends before a token of lower confidence; 0 drafts the whole demand.
        min_survival: a draft ends after the token that takes its survival below this: a further token would cost a pass and
            hardly ever be reached.
    """

    def __init__(self, model: SmallModel, min_confidence: float = 0.0, min_survival: float = 0.0) -> None:
        check_min_confidence(min_confidence)
        check_min_confidence(min_survival, "min_survival")
        self._min_survival = min_survival
        self._model = model
        self._min_confidence = min_confidence

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._model.open(request_id, token_ids, prompt_len, sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._model.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return grow(self._model, demands, self._round, self._min_survival)

    @property
    def stopping(self) -> Stopping:
        return Stopping(self._min_confidence, self._min_survival)

    def foresee(self, demands: Sequence[Demand], max_rows: int) -> list[Draft | None]:
        return foresee(self._model, demands, max_rows)

    def release(self, request_id: str) -> None:
        self._model.release(request_id)

    def check_integrity(self) -> None:
        self._model.check_integrity()

    def _round(self, part: Sequence[PartialDraft]) -> None:
        """One row of each draft."""
        for draft, chosen in zip(part, self._model.choose([draft.question for draft in part]), strict=True):
            draft.add(chosen, self._model, self._min_confidence)
