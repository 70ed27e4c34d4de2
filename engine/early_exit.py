"""Token-wise early exit of the native target (FASER, arXiv 2604.20503, section 4.2): rows that will not be accepted leave a
pass between its layers.

Row i of a verify span predicts its draft token i. Where a check expects another token there, the rows behind row i leave;
row i goes on, since its own token is needed. What is left is a pass that verified fewer draft tokens, so a row that leaves
wrongly costs speed and no token.

    learning pass   margins and final hidden states are recorded; rows leave at most before the head, where their final
                    states are known and a draft token that another one beats is rejected, but for rounding
    exit pass       rows leave by the thresholds of `router.papers.faser_exit`, for passes of about this size
    control pass    as a plain pass, and timed as exit passes are
    else            the plain path; every so often a learning pass

On a GPU checks run beside the pass (`engine.cuda.exit_scores`), so rows leave LAG layers after they were looked at, and none
before the head, whose time they hardly change there. Sampling still waits once; each check is one more wait of the host.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch_layout import StayingRows
from engine.exit_lens import LAG, ExitScores, LensFit, PendingMargins, exit_scores, lens_product, runs_beside, warm_up
from engine.exit_rows import MAX_DRAFTS, WatchedRows, watched_rows
from engine.forward import CausalModel
from engine.ops import Linear
from engine.sampling import SamplingState
from router.cost_model import CostModel
from router.estimates.trial import Trial
from router.papers.faser_exit import DEPTHS, VOCABULARY_LEN, ExitPlan, ExitPrices, ExitSamples, WrongExits, choose_thresholds
from router.plan import Span

LENS_ROWS = (16, 32)  # per hidden dimension, after which lenses are fitted; until the first, all passes are learning passes
LATER_LENS_ROWS = 32  # of a learning pass after the first fit, at least: all 128 add 4% to its time (level amx)
NUM_SAMPLES = 256  # spans that thresholds are chosen by, the newest ones
MIN_SAMPLES = 16  # until so many, nothing leaves
EAGER_PERIOD = 4  # passes from one learning pass to the next, until there are MIN_SAMPLES
EARLY_PERIOD = 8  # where rows leave, until there are NUM_SAMPLES
EARLY_IDLE_PERIOD = 16  # where exits do not pay yet: more samples may allow checks that few do not
PERIOD = 32  # later, where rows leave
IDLE_PERIOD = 128  # and where exits do not pay, or were measured to lose
MIN_PAUSE, MAX_PAUSE = 128, 16_384  # passes without exits, where they were measured to lose
REPLAN_PERIOD = 8  # learning passes, once there are NUM_SAMPLES


@dataclass(slots=True)
class ExitCheck:
    """What is known at one depth."""

    depth: int
    fit: LensFit | None  # None: none is needed, or it is finished
    lens: Linear | None = None  # None: after the last layer, or not fitted yet
    times_s: dict[int, float] = field(default_factory=dict)  # measured, by the bits of the number of rows

    def note_time(self, seconds: float, num_rows: int) -> None:
        """Of a check of so many rows."""
        bits = num_rows.bit_length()
        known = self.times_s.get(bits, seconds)
        self.times_s[bits] = min(seconds, 0.9 * known + 0.1 * seconds)

    def seconds(self, num_rows: int) -> float:
        """Of a check of so many rows: of their number's size, else of the next larger size that was measured, else in
        proportion to the largest. 0: nothing was measured."""
        bits = num_rows.bit_length()
        larger = [known for known in self.times_s if known >= bits]
        if larger:
            return self.times_s[min(larger)]
        most = max(self.times_s, default=bits)
        return self.times_s.get(most, 0.0) * 2.0 ** (bits - most)


class EarlyExit:
    """Decides which passes of a model let rows leave, and learns from the others. Not thread-safe: the target owns it.

    Args:
        cost: measured times of passes, uncorrected: corrections would see the passes that exits made shorter.
        head: of the whole model, [vocab, hidden] in the dtype.
    """

    def __init__(self, model: CausalModel, cost: CostModel, head: torch.Tensor) -> None:
        num_layers, hidden_size = model.config.num_layers, model.config.hidden_size
        self._model = model
        self._cost = cost
        self.lag = LAG if runs_beside(model) else 0
        depths = [num_layers]
        for depth in sorted({max(1, round(share * num_layers)) for share in DEPTHS} - {num_layers}, reverse=True):
            if depth + self.lag < depths[0]:  # one check at a time
                depths.insert(0, depth)
        fits = (LensFit(hidden_size, model.device) if depth < num_layers else None for depth in depths)
        self.checks = [ExitCheck(depth, fit) for depth, fit in zip(depths, fits, strict=True)]
        leave_after = [depth + self.lag for depth in depths]
        self._remaining = tuple(_remaining(model, depth) if depth <= num_layers else 0.0 for depth in leave_after)
        self._head = head
        if self.lag:
            warm_up(model, head, VOCABULARY_LEN)
        self._unit = torch.ones(hidden_size, device=model.device)
        self._scores: ExitScores | None = None
        self._token_counts = np.zeros(model.config.vocab_size, np.int64)
        self._num_lens_rows = 0
        self._fits_due = deque(multiple * hidden_size for multiple in LENS_ROWS)
        self._samples: deque[tuple[NDArray[np.float32], int, int]] = deque(maxlen=NUM_SAMPLES)
        self._plans: dict[tuple[int, int], ExitPlan] = {}
        self._wrong_exits = WrongExits()
        self._unrejected: frozenset[str] = frozenset()  # requests of which the last exit or control pass rejected no draft
        self._trials: defaultdict[tuple[int, int], Trial] = defaultdict(lambda: Trial(MIN_PAUSE, MAX_PAUSE))
        self._num_since = 0  # passes since the last learning pass
        self._num_learned = 0

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> "PassWatch | None":
        """For the next pass, over ``spans``. None: a plain pass."""
        num_rows = sum([len(span.token_ids) for span in spans])
        if self._scores is None:
            return PassWatch(self, spans, states, None)
        num_spans = len([None for span in spans if span.num_drafts])
        if not num_spans:
            return None
        plan = self.plan(num_rows, num_spans)
        trial = self._trials[_size(num_rows, num_spans)]
        self._num_since += 1
        if self._num_since >= self._period(plan, trial):
            self._num_since = 0
            last = None if trial.is_paused or self.lag else plan.thresholds[-1]
            return PassWatch(self, spans, states, None, last_threshold=last)
        if plan.is_off:
            return None
        leaves = trial.next()
        if leaves is None:
            return None
        plan = plan if leaves else ExitPlan((None,) * len(self.checks))
        return PassWatch(self, spans, states, plan, trial, self._unrejected)

    def _period(self, plan: ExitPlan, trial: Trial) -> int:
        if len(self._samples) < MIN_SAMPLES:
            return EAGER_PERIOD
        if trial.is_paused:
            return IDLE_PERIOD
        if len(self._samples) < NUM_SAMPLES:
            return EARLY_IDLE_PERIOD if plan.is_off else EARLY_PERIOD
        return IDLE_PERIOD if plan.is_off else PERIOD

    def plan(self, num_rows: int, num_spans: int) -> ExitPlan:
        """For passes of about so many rows, of about so many spans with drafts."""
        size = _size(num_rows, num_spans)
        if size not in self._plans:
            self._plans[size] = self._choose(num_rows, num_spans)
        return self._plans[size]

    def _choose(self, num_rows: int, num_spans: int) -> ExitPlan:
        num_checked = num_rows - num_spans
        check_s = max([check.seconds(num_checked) for check in self.checks]) / max(1, num_checked)
        if len(self._samples) < MIN_SAMPLES or not check_s:
            return ExitPlan((None,) * len(self.checks))
        margins, num_drafts, num_accepted = zip(*self._samples, strict=True)
        samples = ExitSamples(np.stack(margins), np.array(num_drafts), np.array(num_accepted))
        # Most rows that can leave are those behind the first of a span; the slope down to half of them prices one.
        num_left = max(1, num_checked // 2)
        pass_s = self._cost.step_s(num_rows, 0)
        row_s = (pass_s - self._cost.step_s(num_rows - num_left, 0)) / num_left
        return choose_thresholds(samples, ExitPrices(pass_s / num_spans, row_s, check_s, self._remaining))

    # ---- called by the watch of a pass

    def normalised(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Hidden states at unit scale, in the dtype. ``residual`` is overwritten."""
        return self._model.ops.add_norm(residual, delta, self._unit)

    def begin(
        self, check: ExitCheck, residual: torch.Tensor, delta: torch.Tensor | None, rows: WatchedRows
    ) -> PendingMargins | None:
        """Margins of the draft token behind each of the rows. None: not known yet."""
        if self._scores is None or (check.lens is None and check.depth < self._model.config.num_layers):
            return None
        return self._scores.begin(residual, delta, check.lens, rows)

    def learn_rows(self, token_ids: Sequence[int], hidden: Mapping[int, torch.Tensor]) -> None:
        """Adds rows of a learning pass to the lenses. ``hidden``: normalised states of all its rows, by depth."""
        if not self._fits_due:
            return
        every = 1 if self._scores is None else max(1, len(token_ids) // LATER_LENS_ROWS)
        rows = slice(self._num_learned % every, None, every)  # not always the same places of spans
        np.add.at(self._token_counts, np.array(token_ids), 1)
        for check in self.checks:
            if check.fit is not None:
                check.fit.add(hidden[check.depth][rows], hidden[self.checks[-1].depth][rows])
        self._num_lens_rows += len(token_ids[rows])
        if self._num_lens_rows >= self._fits_due[0]:
            self._fits_due.popleft()
            self._fit()

    def learn_spans(self, samples: Sequence[tuple[NDArray[np.float32], int, int]]) -> None:
        """Adds the spans of a learning pass: margins [checks, MAX_DRAFTS], drafts, and accepted ones."""
        if len(self._samples) < NUM_SAMPLES or self._num_learned % REPLAN_PERIOD == 0:
            self._plans.clear()
        self._samples.extend(samples)
        self._num_learned += 1

    def note_pass(self, plan: ExitPlan, num_cut: int, num_wrong: int, unrejected: frozenset[str]) -> None:
        """What an exit or control pass did: spans that were cut, those of them that lost a token, and the requests with no
        rejected draft seen."""
        self._unrejected = unrejected
        if self._wrong_exits.note(plan, num_cut, num_wrong):
            self._samples.clear()
            self._plans.clear()

    @property
    def num_lost_per_wrong_cut(self) -> float:
        """Tokens: the one after the draft token, and as many as are usually accepted behind it."""
        return 1.0 + sum([num_accepted for _, _, num_accepted in self._samples]) / max(1, len(self._samples))

    def learn_time(self, check: ExitCheck, seconds: float, num_rows: int) -> None:
        if num_rows.bit_length() not in check.times_s:  # plans for this size were chosen by the time of another
            self._plans.clear()
        check.note_time(seconds, num_rows)

    def _fit(self) -> None:
        frequent = np.argsort(-self._token_counts, kind="stable")[:VOCABULARY_LEN]
        self._scores = exit_scores(self._model, self._head, np.sort(frequent))
        for check in self.checks:
            if check.fit is not None:
                check.lens = lens_product(self._model, check.fit.solve())
                if not self._fits_due:
                    check.fit = None
        self._plans.clear()  # the samples stay, until newer ones follow: margins by the first lenses are not far off


@dataclass(slots=True)
class PassWatch:
    """``engine.native.PassWatch``. ``plan``: of an exit pass; None: a learning pass."""

    exits: EarlyExit
    spans: Sequence[Span]
    states: Mapping[str, SamplingState]
    plan: ExitPlan | None  # is_off: of a control pass
    trial: Trial | None = None  # that is told the time of the pass
    unchecked: frozenset[str] = frozenset()  # requests whose rows all stay
    last_threshold: float | None = None  # of a learning pass, before the head
    depths: tuple[int, ...] = field(init=False)  # of its checks, and where rows leave
    span_lens: NDArray[np.int64] = field(init=False)  # rows that stay
    num_watched: int = field(init=False, default=0)  # rows that are checked
    _rows: WatchedRows = field(init=False)
    _margins: NDArray[np.float32] = field(init=False)  # [spans, checks, MAX_DRAFTS]
    _hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # of a learning pass, normalised, all rows
    _due: dict[int, tuple[int, PendingMargins]] = field(default_factory=dict)  # checks under way, by where rows leave
    _learned: list[tuple[int, PendingMargins]] = field(default_factory=list)  # of a learning pass beside it
    _started_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.span_lens = np.array([len(span.token_ids) for span in self.spans])
        checks = self.exits.checks
        thresholds = (0.0,) * len(checks) if self.plan is None else self.plan.thresholds
        begin = {c.depth for c, threshold in zip(checks, thresholds, strict=True) if threshold is not None}
        lag = 0 if self.plan is None else self.exits.lag
        self.depths = tuple(sorted(begin | {depth + lag for depth in begin}))
        if not self.depths:
            return  # a control pass must cost what a plain one costs
        self._rows = watched_rows(self.spans, self.states, self.unchecked)
        self.num_watched = len(self._rows.at)
        self._margins = np.full((len(self.spans), len(checks), MAX_DRAFTS), -np.inf, np.float32)

    def look(self, depth: int, residual: torch.Tensor, delta: torch.Tensor | None) -> StayingRows | None:
        if depth in self._due:
            return self._end(*self._due.pop(depth), residual.device)
        number = next((i for i, check in enumerate(self.exits.checks) if check.depth == depth), None)
        if number is None:  # nothing was checked that could leave here
            return None
        check = self.exits.checks[number]
        if self.plan is None:
            self._hidden[depth] = residual if delta is None else self.exits.normalised(residual.clone(), delta)
        pending = self.exits.begin(check, residual, delta, self._rows) if len(self._rows.at) else None
        if pending is None:
            return None
        if not self.exits.lag:
            return self._end(number, pending, residual.device)
        if self.plan is None:
            self._learned.append((number, pending))
        else:
            self._due[depth + self.exits.lag] = number, pending
        return None

    def _end(self, number: int, pending: PendingMargins, device: torch.device) -> StayingRows | None:
        """Of a check: rows leave, or are learned from."""
        check, rows, margins = self.exits.checks[number], self._rows, pending.wait()
        threshold = self.last_threshold if check is self.exits.checks[-1] else None
        if self.plan is not None:
            threshold = self.plan.thresholds[number]
        else:
            self.exits.learn_time(check, margins.seconds, len(rows.at))
            self._margins[rows.span, number, rows.index] = margins.values
        return None if threshold is None else self._leave(margins.values > threshold, device)

    def _leave(self, expects_other: NDArray[np.bool_], device: torch.device) -> StayingRows | None:
        """The rows behind the first one of each span that expects another token leave."""
        rows = self._rows
        if not expects_other.any():
            return None
        found = np.flatnonzero(expects_other)
        starts = np.concatenate([[0], np.cumsum(self.span_lens)[:-1]])
        last = starts + self.span_lens - 1  # rows of the pass that stay last
        np.minimum.at(last, rows.span[found], rows.at[found])
        span_lens = last - starts + 1
        if (span_lens == self.span_lens).all():
            return None
        rows = self._rows = rows.select(rows.at < last[rows.span])
        new_starts = np.concatenate([[0], np.cumsum(span_lens)[:-1]])
        rows.at = rows.at + (new_starts - starts)[rows.span]
        self.span_lens = span_lens
        return StayingRows.of(starts, span_lens, device)

    def nums_drafts(self) -> list[int]:
        return [num - span.num_compute for span, num in zip(self.spans, self.span_lens.tolist(), strict=True)]

    def learn(self) -> None:
        if self.plan is not None:
            seconds = time.perf_counter() - self._started_s
            num_lost_each = self.exits.num_lost_per_wrong_cut  # by the samples, which a judgement may drop
            num_lost = self._judge(self.plan) * num_lost_each
            num_tokens = sum([len(span.chosen) for span in self.spans])
            was_checked = self.plan.is_off or self.num_watched
            if self.trial is not None and num_tokens and was_checked:
                # Not per token: how many are committed differs more from pass to pass than the time does.
                num_rows = sum([len(span.token_ids) for span in self.spans])
                self.trial.note(not self.plan.is_off, seconds * (1.0 + num_lost / num_tokens) / num_rows)
            return
        for number, pending in self._learned:
            self._end(number, pending, torch.device("cpu"))
        token_ids = [token_id for span in self.spans for token_id in span.token_ids]
        watched = np.flatnonzero(self._margins[:, -1, 0] > -np.inf).tolist()
        if watched:
            self.exits.learn_spans(
                [
                    (self._margins[i], min(MAX_DRAFTS, span.num_drafts), min(MAX_DRAFTS, span.num_accepted))
                    for i in watched
                    for span in (self.spans[i],)
                ]
            )
        self.exits.learn_rows(token_ids, self._hidden)

    def _judge(self, plan: ExitPlan) -> int:
        """Returns how many cuts lost a token: there the token of the last row that stayed is the draft token behind which
        rows left."""
        num_cut = num_wrong = 0
        unrejected = []
        for span, span_len in zip(self.spans, self.span_lens.tolist(), strict=True):
            num_left = len(span.token_ids) - span_len
            is_whole = span.num_accepted == span.num_drafts - num_left
            if num_left:
                num_cut += 1
                is_whole = is_whole and span.chosen[-1:] == (span.token_ids[-num_left],)
                num_wrong += is_whole
            if is_whole and span.num_drafts:
                unrejected.append(span.request_id)
        self.exits.note_pass(plan, num_cut, num_wrong, frozenset(unrejected))
        return num_wrong


def _size(num_rows: int, num_spans: int) -> tuple[int, int]:
    return num_rows.bit_length(), num_spans.bit_length()


def _remaining(model: CausalModel, depth: int) -> float:
    """Share of the weight products of a row that comes after ``depth`` layers."""
    c = model.config
    layer = (2 * c.q_size + 2 * c.kv_size) * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    head = c.vocab_size * c.hidden_size
    return ((c.num_layers - depth) * layer + head) / (c.num_layers * layer + head)
