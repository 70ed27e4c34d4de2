"""Early exit whose estimates and thresholds are given, so that rows leave from the first pass on."""

from collections.abc import Mapping, Sequence

import torch

from engine.early_exit import EarlyExit, PassWatch
from engine.exit_lens import ExitScores, lens_product
from engine.forward import CausalModel
from engine.models.weights import LinearWeight
from engine.sampling import SamplingState
from router.cost_model import TableCost
from router.papers.faser_exit import ExitPlan
from router.plan import Span

STEEP = TableCost((1, 100), (0.001, 0.1))  # every row costs as much


class PlannedExits(EarlyExit):
    """Rows leave by a margin over 0 after the first of two checks, whose lens changes nothing, in every other pass.
    ``watches``: of all passes that are not plain."""

    def __init__(self, model: CausalModel, scores: ExitScores) -> None:
        super().__init__(model, STEEP, model.embedding)
        self._scores, size = scores, model.config.hidden_size
        identity = torch.eye(size, device=model.device), torch.zeros(size, device=model.device)
        self.checks[0].lens = lens_product(model, LinearWeight(*identity))
        self.watches: list[PassWatch] = []

    def plan(self, num_rows: int, num_spans: int) -> ExitPlan:
        return ExitPlan((0.0, None), saved_share=0.5)

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> PassWatch | None:
        watch = super().watch(spans, states)
        if watch is not None:
            self.watches.append(watch)
        return watch

    @property
    def num_left(self) -> int:
        return sum(sum(len(span.token_ids) for span in one.spans) - int(one.span_lens.sum()) for one in self.watches)
