"""The requests of a simulated target: as `engine.sequences`, with lengths in the place of tokens."""

from dataclasses import dataclass

from cluster.types import FinishReason
from router.assignment import NO_POSITIONS, Chain, Observation
from router.estimates.drafter_stats import Judgement
from router.plan import SequenceView
from simulator.agreement import SimulatedRequest
from simulator.drafter import SimulatedProposal

_MAX_TOLD = 8  # as engine.sequences.MAX_TOLD


class SimulatedSequence:
    """As `engine.sequences.LiveSequence`. Lengths count the prompt; ``position`` does not."""

    __slots__ = (
        "awaiting_since_s",
        "can_have_draft",
        "committed_len",
        "committed_s",
        "computed_len",
        "confidences",
        "drafter",
        "first_token_s",
        "held",
        "lead",
        "num_drafted",
        "num_right",
        "num_rounds",
        "num_switches",
        "request",
        "running",
        "survival",
        "told_s",
        "unfinished",
    )

    def __init__(self, request: SimulatedRequest) -> None:
        self.request = request
        self.committed_len = request.prompt_len
        self.computed_len = 0
        self.running = self.held = False
        self.drafter: str | None = None
        self.lead: Chain = ()  # who rides ahead of it
        self.awaiting_since_s: float | None = None
        self.can_have_draft = False
        self.committed_s: float | None = None  # when it last committed, if that was with this drafter
        self.first_token_s: float | None = None
        self.told_s: dict[int, float] = {}
        self.num_drafted: int | None = None  # of the proposal at hand; None: there is none
        self.num_right = 0
        self.unfinished = False
        self.confidences: tuple[float, ...] = ()
        self.survival: tuple[float, ...] = ()
        self.num_rounds = self.num_switches = 0

    @property
    def chain(self) -> Chain:
        return () if self.drafter is None else (*self.lead, self.drafter)

    @property
    def position(self) -> int:
        return self.committed_len - self.request.prompt_len

    def view(self) -> SequenceView:
        request = self.request
        has_drafts = self.num_drafted is not None
        return SequenceView(
            request.id,
            self.committed_len,
            self.computed_len,
            self.num_drafted or 0,
            self.running,
            self.drafter,
            self.awaiting_since_s,
            request.max_tokens - self.position,
            self.survival if has_drafts else (),
        )

    def drop_proposal(self) -> None:
        self.num_drafted = None
        self.num_right = 0

    def offer(self, proposal: SimulatedProposal) -> bool:
        """As `engine.sequences.Sequences.offer`."""
        lag = self.position - proposal.base
        if lag < 0:
            return False
        if lag > 0 and (self.num_drafted is not None or proposal.num_right < lag or lag >= proposal.num_tokens):
            return False
        self.num_drafted = proposal.num_tokens - lag
        self.num_right = proposal.num_right - lag
        self.unfinished = proposal.unfinished
        self.confidences = proposal.confidences[lag:] if lag else proposal.confidences
        self.awaiting_since_s = None
        return True

    def expect_nothing(self) -> None:
        self.awaiting_since_s = None
        self.can_have_draft = False

    def await_proposal(self, now_s: float) -> None:
        self.awaiting_since_s = now_s
        self.can_have_draft = True  # a companion is always asked
        self.told_s[self.position] = now_s
        if len(self.told_s) > _MAX_TOLD:
            del self.told_s[next(iter(self.told_s))]

    def judge(self, num_new: int) -> Judgement | None:
        """As `engine.sequences.Sequences._judge`, of ``num_new`` committed tokens; None: no proposal was at hand."""
        num_drafted = self.num_drafted
        if num_drafted is None or self.drafter is None:
            return None
        num_right = min(self.num_right, num_new)
        num_judged = min(num_right + 1, num_drafted, num_new)
        judgement = Judgement(self.drafter, self.confidences[:num_judged], num_right, self.unfinished)
        self.num_drafted = None
        if num_right == num_new < num_drafted:
            self.num_drafted = num_drafted - num_right
            self.num_right -= num_right
            self.confidences = self.confidences[num_right:]
            if self.survival:
                certain = max(self.survival[num_right - 1], 1e-9)
                self.survival = tuple(s / certain for s in self.survival[num_right:])
        return judgement


class SlotCounts:
    """What a drafter did for a request since the router last asked."""

    __slots__ = (
        "bases",
        "elapsed_s",
        "num_accepted",
        "num_committed",
        "num_missed",
        "num_proposed",
        "num_rounds",
        "positions",
        "request",
    )

    def __init__(self, request: SimulatedRequest) -> None:
        self.request = request
        self.num_rounds = self.num_proposed = self.num_accepted = self.num_committed = self.num_missed = 0
        self.elapsed_s = 0.0
        self.positions = NO_POSITIONS
        self.bases: list[int] = []  # where its rounds began

    def observation(self, drafter: str) -> Observation:
        return Observation(
            self.request.id,
            drafter,
            self.num_rounds,
            self.num_proposed,
            self.num_accepted,
            self.num_committed,
            self.elapsed_s,
            self.positions,
            self.num_missed,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that came to its end. ``finish``: LENGTH, or why it was refused."""

    request: SimulatedRequest
    finish: FinishReason
    first_token_s: float
    end_s: float
    num_tokens: int
    num_rounds: int
    num_switches: int
    chain: Chain = ()  # at the end
