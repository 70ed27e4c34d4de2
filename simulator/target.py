"""A simulated target: the live round over an engine that only knows how long passes take and what they would find."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.transport.base import Mailbox
from cluster.types import Request
from drafters.loop import StepWork
from engine.loop_status import StepReport
from engine.round import TargetLoop
from router.plan import Capacity, Span
from simulator.drafter import TimedLoop
from simulator.links import STEP, Events, VirtualMailbox
from simulator.text import Script
from simulator.timing import Jitter, PassTimer, Rows


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """As `router.plan.Capacity`, and the requests that may wait."""

    block_len: int
    num_blocks: int
    max_num_sequences: int
    max_pass_tokens: int
    max_model_len: int
    max_waiting: int = 1024


class SimulatedEngine:
    """A `TargetEngine` that answers at once. ``seconds`` is what the last pass would have taken.

    Args:
        scripts: of the requests, by id.
    """

    def __init__(self, limits: TargetLimits, timer: PassTimer, scripts: Mapping[str, Script]) -> None:
        self.seconds = 0.0
        self._limits = limits
        self._timer = timer
        self._scripts = scripts
        self._computed: dict[str, int] = {}
        self._num_blocks_held = 0

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        self._computed[request.id] = 0
        return 0

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        return 0

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        decoding: list[Rows] = []
        prefilling: list[Rows] = []
        for span in spans:
            request_id, num_drafts, num_rows = span.request_id, span.num_drafts, len(span.token_ids)
            end = span.base_len + span.num_compute
            (decoding if span.num_compute == 1 else prefilling).append((num_rows, end))
            if not span.samples:
                self._set_computed(request_id, end)
                continue
            tokens = self._scripts[request_id].tokens(end, num_drafts + 1)
            num_right = 0
            if num_drafts:
                drafts = span.drafts
                if drafts == tokens[:num_drafts]:
                    num_right = num_drafts
                else:
                    while num_right < len(tokens) and drafts[num_right] == tokens[num_right]:
                        num_right += 1
                    tokens = tokens[: num_right + 1]
            self._set_computed(request_id, end + len(tokens) - 1)
            span.chosen, span.num_accepted = tokens, num_right
        self.seconds = self._timer.seconds(decoding, prefilling)
        return spans

    def release(self, request_id: str) -> None:
        if request_id in self._computed:
            self._set_computed(request_id, 0)
            del self._computed[request_id]

    def capacity(self) -> Capacity:
        limits = self._limits
        return Capacity(
            limits.block_len,
            limits.num_blocks,
            limits.num_blocks - self._num_blocks_held,
            limits.max_num_sequences,
            limits.max_pass_tokens,
            limits.max_model_len,
        )

    def check_integrity(self) -> None:
        assert self._num_blocks_held == 0, "blocks are held though no request is live"

    def _set_computed(self, request_id: str, length: int) -> None:
        block_len = self._limits.block_len
        self._num_blocks_held += -(-length // block_len) + (-self._computed[request_id] // block_len)
        self._computed[request_id] = length


class SimulatedTarget:
    """Drives a `TargetLoop` on virtual time: while a pass takes its time, or a companion its, mail waits.

    Args:
        make_loop: the loop that reads this mailbox.
        companions: drafters that are stepped between passes, as `engine.colocated.InlineDrafters` steps them.
    """

    def __init__(
        self,
        events: Events,
        engine: SimulatedEngine,
        make_loop: Callable[[Mailbox], TargetLoop],
        jitter: Jitter,
        companions: Sequence[TimedLoop] = (),
    ) -> None:
        self.busy_s = 0.0  # of passes
        self.num_open = 0  # requests sent to it that have not ended
        self.mailbox = VirtualMailbox(self._wake)
        self.loop = make_loop(self.mailbox)
        self._events = events
        self._engine = engine
        self._jitter = jitter
        self._companions = companions
        self._is_busy = self._is_woken = False

    def _wake(self) -> None:
        if not self._is_busy and not self._is_woken:
            self._is_woken = True
            self._events.at(self._events.now_s, STEP, self._step)

    def _step(self, now_s: float) -> None:
        self._is_woken = False
        if self._is_busy:
            return
        begun = self.loop.begin(now_s)
        self._is_busy = True
        if isinstance(begun, StepReport):
            self._draft(now_s, begun.wake_s)
            return
        self.loop.execute(begun)
        seconds = self._jitter(self._engine.seconds)

        def end(now_s: float) -> None:
            self.loop.finish(begun, now_s)
            self._draft(now_s, goes_on=True)

        self.busy_s += seconds
        self._events.at(now_s + seconds, STEP, end)

    def _draft(self, now_s: float, wake_s: float | None = None, *, goes_on: bool = False) -> None:
        """Steps the companions one after the other, each until it has nothing to do, and goes on with the next round.

        Args:
            wake_s: when that is at the latest; None: without mail there is none.
            goes_on: at once, after a pass or a draft.
        """
        for companion in self._companions:
            work, seconds = companion.begin(now_s)
            if work == "nothing":
                continue

            def end(end_s: float, companion: TimedLoop = companion, work: StepWork = work) -> None:
                companion.loop.finish(work, now_s, end_s)
                self.loop.observer.drafted_inline({companion.loop.name: end_s - now_s})
                self._draft(end_s, goes_on=True)

            self._events.at(now_s + seconds, STEP, end)
            return
        self._is_busy = False
        if goes_on or self.mailbox.has_mail:
            self._step(now_s)
        elif wake_s is not None:
            self._events.at(wake_s, STEP, lambda now_s: self._wake())
