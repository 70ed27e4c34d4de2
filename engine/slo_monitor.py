"""Service-level objectives at a target: requests refused because theirs would be missed, and attainment."""

from cluster.counts import SloCounts
from cluster.types import Commit, FinishReason, Prefill, Request
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router.cost_model import CostModel
from router.plan import Capacity, SequenceView, SloProgress
from router.planning.admission import Departures, Load, exceeds_objective, predicted_ttft


class SloMonitor:
    """The round owns it, and calls the ``note`` methods ``observing``."""

    def __init__(self, cost: CostModel, telemetry: Telemetry) -> None:
        self._cost = cost
        self._attainment, self._observing = telemetry.attainment, telemetry.observing
        self._departures = Departures()
        self._num_decode_rows = self._num_ended = 0

    def refusal(
        self, request: Request, cached_len: int, sequences: Sequences, capacity: Capacity, now_s: float
    ) -> Commit | None:
        """The only commit of a request that is refused, with the predicted times; None: it is taken. ``cached_len``: of its
        tokens those that the prefix cache holds."""
        slo = request.slo
        if slo.ttft_s is None or request.was_admitted:
            return None
        with self._observing:
            return self._predicted_refusal(request, slo.ttft_s, cached_len, sequences, capacity, now_s)
        return None

    def _predicted_refusal(
        self, request: Request, ttft_s: float, cached_len: int, sequences: Sequences, capacity: Capacity, now_s: float
    ) -> Commit | None:
        prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        progress = SloProgress(now_s + ttft_s, request.slo.tpot_s)
        view = SequenceView(
            request.id, prompt_len, 0, 0, False, None, None, max_tokens, arrived_s=now_s, slo=progress, cached_len=cached_len
        )
        load = Load(self._num_decode_rows, self._departures.interval_s)
        predicted = predicted_ttft(view, sequences.views(), load, capacity, self._cost, now_s)
        if not exceeds_objective(view, predicted, self._cost):
            return None
        self._attainment.note(SloCounts(request.slo.name or "", num_refused=1))
        predicted_s = predicted.queue_s + predicted.prefill_s
        error = f"the first token would come after {predicted_s:.2f} s, the objective leaves {ttft_s:.2f} s"
        prefill = Prefill(0, predicted.queue_s, predicted.prefill_s)
        return Commit(request.id, request.committed_len, (), finish=FinishReason.OVERLOADED, error=error, prefill=prefill)

    def note_end(self, sequence: LiveSequence, now_s: float) -> None:
        """A request has left, for whatever reason."""
        self._num_ended += 1
        is_answered = sequence.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if not sequence.has_slo or not is_answered or sequence.first_token_s is None:
            return
        num_later = len(sequence.token_ids) - sequence.prompt_len - 1
        tpot_s = (now_s - sequence.first_token_s) / num_later if num_later > 0 else None
        ttft_s = sequence.first_token_s - sequence.arrived_s
        self._attainment.note(SloCounts.of_answer(sequence.request.slo, ttft_s, tpot_s))

    def note_pass(self, num_decode_rows: int, now_s: float, is_idle: bool) -> None:
        """A pass ended."""
        self._num_decode_rows = num_decode_rows
        if self._num_ended:
            self._departures.note(now_s, self._num_ended)
            self._num_ended = 0
        if is_idle:
            self._departures.idle()
