"""Drafters in the target's process: which are queried, since drafts must save more than they cost on a shared device; and
where they draft: on the target's own thread, or in a lane beside it."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

from cluster.types import Commit
from engine.partition import Lane
from router.assignment import drafter_of
from router.cost_model import CostModel
from router.drafting.colocated_gate import ColocatedGate
from router.drafting.value import saved_s

logger = logging.getLogger(__name__)

END_DEADLINE_S = 30.0  # of a draft under way
PAUSE_S = 5.0  # between two rounds: the machine was suspended
_CATCH_UP_LEN = 256  # tokens whose profiled time is taken

StepWork = Literal["nothing", "answered", "drafted", "drafted ahead", "scored"]


class InlineLoop(Protocol):
    """A drafter's loop (`drafters.loop.DrafterLoop`), linked to the target's mailbox as any other."""

    @property
    def name(self) -> str: ...

    def begin(self, now_s: float) -> StepWork: ...

    def finish(self, work: StepWork, began_s: float, now_s: float) -> None: ...

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None: ...

    def wake(self) -> None: ...


class InlineDrafters:
    """Loops of drafters that are stepped on the target's thread, between passes, unless they have a lane (``draft_in``).

    On the cores of the target a thread of their own slows both: the threads of matrix products of one wait actively, and
    those of the other find no core. ``add`` and ``remove``: from any thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # guards _loops and _threads
        self._loops: dict[str, tuple[InlineLoop, Callable[[], None]]] = {}
        self._lane: Lane | None = None
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._end_by_s: float | None = None  # the threads have been told to end
        self._asked_s = 0.0  # whether they have, when last

    def add(self, loop: InlineLoop, unlink: Callable[[], None]) -> None:
        """``unlink`` is called if the loop fails; it is left out from then on."""
        with self._lock:
            self._loops = {**self._loops, loop.name: (loop, unlink)}

    def remove(self, name: str) -> None:
        with self._lock:
            self._loops = {key: one for key, one in self._loops.items() if key != name}
            if (known := self._threads.get(name)) is not None:
                known[1].set()

    def step(self) -> dict[str, float]:
        """Steps each loop until it has nothing to do. Returns the seconds of those that had. In a lane, those that have been
        added get their threads."""
        if self._lane is not None:
            self._start_threads(self._lane)
            return {}
        seconds = {}
        for name, (loop, unlink) in self._loops.items():
            start_s = now_s = self._clock()
            try:
                while (work := loop.begin(now_s)) != "nothing":
                    end_s = self._clock()
                    loop.finish(work, now_s, end_s)
                    now_s = end_s
                    seconds[name] = end_s - start_s
            except Exception as error:  # noqa: BLE001  this process owns the loop, and a drafter's fault costs speed alone
                self._leave_out(loop, unlink, error)
        return seconds

    @property
    def is_ending(self) -> bool:
        return self._end_by_s is not None

    def end_threads(self, wait_s: float = 0.0) -> bool:
        """Tells the threads to end. Whether they have, within ``wait_s``; a drafter whose thread does not end within
        END_DEADLINE_S of the first call is left out."""
        now_s, before_s = self._clock(), self._asked_s
        self._asked_s = now_s
        if self._end_by_s is not None and now_s - before_s > PAUSE_S:
            self._end_by_s += now_s - before_s  # the threads were suspended, too
        if self._end_by_s is None:
            self._end_by_s = now_s + END_DEADLINE_S
            for name, (_, stop) in self._threads.items():
                stop.set()
                if (known := self._loops.get(name)) is not None:  # its thread leaves it out where it fails
                    known[0].wake()
        for name, (thread, _) in list(self._threads.items()):
            thread.join(wait_s)
            if not thread.is_alive():
                del self._threads[name]
            elif self._clock() >= self._end_by_s:
                del self._threads[name]
                if (known := self._loops.get(name)) is not None:
                    self._leave_out(*known, TimeoutError(f"it drafts for more than {END_DEADLINE_S:g} s"))
        return not self._threads

    def draft_in(self, lane: Lane | None) -> None:
        """From now on on threads in ``lane``; None: on the target's thread. The threads before have ended."""
        self._lane, self._end_by_s = lane, None
        if lane is not None:
            self._start_threads(lane)

    def _start_threads(self, lane: Lane) -> None:
        """Starts a thread for each loop that has none. The thread of a removed loop must have ended before another loop of
        its name begins."""
        with self._lock:
            for name, (loop, unlink) in () if self.is_ending else self._loops.items():
                known = self._threads.get(name)
                if known is None or (known[1].is_set() and not known[0].is_alive()):
                    stop = threading.Event()
                    thread = threading.Thread(
                        target=self._run, args=(loop, unlink, lane, stop), name=f"lane {name}", daemon=True
                    )
                    with suppress(RuntimeError):  # no thread can be started now: this is called again
                        thread.start()
                        self._threads[name] = thread, stop

    def _run(self, loop: InlineLoop, unlink: Callable[[], None], lane: Lane, stop: threading.Event) -> None:
        try:
            lane.enter()
            loop.run(stop, self._clock)
            lane.enter()  # waits for what it has launched
        except Exception as error:  # noqa: BLE001  as in ``step``
            self._leave_out(loop, unlink, error)

    def _leave_out(self, loop: InlineLoop, unlink: Callable[[], None], error: Exception) -> None:
        logger.error("drafter %s failed, and is left out from now on", loop.name, exc_info=error)
        with self._lock:
            if (known := self._loops.get(loop.name)) is not None and known[0] is loop:  # else another has taken its name
                self.remove(loop.name)
        unlink()


class ColocatedDrafters:
    """Decides for each batch size whether a drafter in the target's process is queried: its drafts must save more time than
    the target waits for them. What must be sent to a drafter that is not queried waits in its outbox, all but the ends of
    sessions. ``names``: of those drafters."""

    def __init__(self, names: Collection[str], cost: CostModel) -> None:
        self._cost = cost
        self.draft_apart = False  # in a lane beside the target's: drafts and passes do not slow each other
        self._gates = {name: ColocatedGate(self._catch_up_token_s(name)) for name in names}
        self._batch = 1  # requests of the last pass that sampled
        self._waiting_since_s: float | None = None  # the target waits for proposals
        self._awaited: set[str] = set()  # drafters of these proposals
        self._taken_s: dict[str, float] = {}  # that the drafts of the last decision have taken so far
        self._outstanding: set[str] = set()  # drafters of requests that were held when the last pass began
        self._put_off: set[str] = set()  # of these, those that the last pass decided nothing for

    def __bool__(self) -> bool:
        return bool(self._gates)

    def is_queried(self, drafter: str) -> bool:
        """True for a drafter in another process."""
        gate = self._gates.get(drafter)
        return gate is None or gate.is_queried

    def shares_device(self, drafter: str) -> bool:
        """Whether its drafts and the target's passes slow each other."""
        return drafter in self._gates and not self.draft_apart

    def choose(
        self,
        batch: int,
        num_context: int,
        wanted: Collection[str | None],
        *,
        prompts_wait: bool,
        num_missed: Callable[[str], int],
    ) -> None:
        """Decides who is queried for the next proposals.

        Args:
            batch: requests.
            num_context: tokens that they attend to.
            wanted: drafters of these requests. A gate counts no round of others: else its trials would pass while nobody
                could try the drafter.
            prompts_wait: as of `ColocatedGate.decide`.
            num_missed: the same, by drafter.
        """
        plain_s = self._cost.step_s(batch, num_context)
        # A pass of others came before what is awaited of them: the wait belongs to their last decision. Once, lest it stays.
        self._put_off = self._outstanding - self._put_off
        for name, gate in self._gates.items():
            if name in self._put_off:
                continue
            gate.add_draft_time(self._batch, self._taken_s.pop(name, 0.0))
            if name in wanted:
                gate.decide(batch, plain_s, prompts_wait, partial(num_missed, name))
            else:
                gate.skip()
        self._batch = batch

    def note_pass(self, commits: Sequence[Commit], batch: int, num_context: int, num_prompt_rows: int) -> None:
        """Records the time that each drafter's drafts saved in a pass over ``batch`` sequences. ``num_prompt_rows``: as of
        `saved_s`."""
        for name, gate in self._gates.items():
            own = [commit for commit in commits if commit.drafter == name]
            if own:
                num_verified = sum(commit.num_proposed for commit in own)
                num_accepted = sum(commit.num_accepted for commit in own)
                gate.add_saving(saved_s(batch, num_verified, num_accepted, num_context, self._cost, num_prompt_rows))

    def note_plan(self, awaited: Collection[str | None], begins_pass: bool, now_s: float) -> None:
        """A plan holds requests for proposals of the drafters ``awaited``. Where it begins no pass, the target waits for
        them: that time counts as what their drafts cost, once a pass begins that holds none of their requests."""
        if begins_pass:
            if self._waiting_since_s is not None:
                for name in self._awaited & self._gates.keys():
                    self._add(name, now_s - self._waiting_since_s)
            self._outstanding = self._gates.keys() & set(awaited)
            for name in self._gates.keys() - self._outstanding:
                self._gates[name].add_draft_time(self._batch, self._taken_s.pop(name, 0.0))
        elif awaited:
            self._awaited |= {name for name in awaited if name is not None}
            if self._waiting_since_s is None:
                self._waiting_since_s = now_s
            return
        self._waiting_since_s = None
        self._awaited.clear()

    def note_inline(self, seconds: Mapping[str, float]) -> None:
        """Drafters took so long on the target's thread."""
        for name, one_s in seconds.items():
            self._add(name, one_s)

    def _add(self, name: str, seconds: float) -> None:
        self._taken_s[name] = self._taken_s.get(name, 0.0) + seconds

    def note_overhead(self, seconds: float) -> None:
        """The last round took so long beside its pass."""
        for gate in self._gates.values():
            gate.add_overhead(seconds)

    def _catch_up_token_s(self, name: str) -> float:
        seconds = self._cost.catch_up_s(drafter_of(name), _CATCH_UP_LEN)
        return 0.0 if seconds is None else seconds / _CATCH_UP_LEN
