"""Drafting with any causal model that has the target's vocabulary, token by token for all requests at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster.errors import InvalidField
from cluster.types import SamplingParams
from drafters.protocol import Demand, Draft
from drafters.small_model import Question, SmallModel


@dataclass(slots=True)
class Growing:
    """A draft under way: the model's own tokens so far, and when it is done."""

    demand: Demand
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def num_missing(self) -> int:
        return self.demand.num_tokens - len(self.token_ids)

    @property
    def ahead(self) -> tuple[int, ...]:
        return (*self.demand.ahead, *self.token_ids)

    def add(self, token_id: int, confidence: float, model: SmallModel, min_confidence: float) -> None:
        """The next token, unless the draft is done: it is long enough, the request ends with it, or the model doubts."""
        if self.done:
            return
        if confidence < min_confidence:
            self.done = True
            return
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        self.done = self.num_missing <= 0 or model.ends(self.demand.request_id, token_id)

    def draft(self) -> Draft:
        return Draft(self.demand.request_id, tuple(self.token_ids), tuple(self.confidences))


def starting(model: SmallModel, growing: Sequence[Growing]) -> Iterator[list[Growing]]:
    """The drafts that can grow now, in parts that the model's cache holds at once. The others stay empty: nothing is asked
    of them, they lie beyond what the model can hold, or they still catch up."""
    wanted = [draft for draft in growing if draft.num_missing > 0]
    questions = [Question(draft.demand.request_id, draft.ahead) for draft in wanted]
    lens = [draft.num_missing for draft in wanted]
    for indices in model.parts(list(zip(questions, lens, strict=True))):
        ready = model.catch_up([questions[i] for i in indices])
        part = [wanted[i] for i, is_ready in zip(indices, ready, strict=True) if is_ready]
        if part:
            yield part


def check_min_confidence(value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidField("min_confidence", value, "must be at least 0 and less than 1")


class ModelDrafter:
    """Samples the model's own continuation with the target's noise and parameters, so the target as its own drafter is
    always right.

    A request that misses much of its context (a long prompt, just opened) gets an empty draft until it has caught up, one
    pass per batch, so that the others need not wait.

    Args:
        min_confidence: a draft ends before a token of lower confidence; 0 drafts the whole demand.
    """

    def __init__(self, model: SmallModel, min_confidence: float = 0.0) -> None:
        check_min_confidence(min_confidence)
        self._model = model
        self._min_confidence = min_confidence

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._model.open(request_id, token_ids, prompt_len, sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._model.extend(request_id, token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        growing = [Growing(demand) for demand in demands]
        for part in starting(self._model, growing):
            while part := [draft for draft in part if not draft.done]:
                chosen = self._model.choose([Question(draft.demand.request_id, draft.ahead) for draft in part])
                for draft, answer in zip(part, chosen, strict=True):
                    if answer.token_ids:
                        draft.add(answer.token_ids[0], answer.confidences[0], self._model, self._min_confidence)
                    else:  # no token can be chosen there: the target will find the same
                        draft.done = True
        return [draft.draft() for draft in growing]

    def release(self, request_id: str) -> None:
        self._model.release(request_id)

    def check_integrity(self) -> None:
        self._model.check_integrity()
