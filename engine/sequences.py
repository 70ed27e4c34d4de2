"""The live requests of one target: their committed tokens, the proposals at hand, and when they end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.types import Commit, FinishReason, ModelInfo, Prefill, Proposal, Request
from engine.target import SpanInput, SpanOutcome
from profiler.drafter_stats import Judgement
from router.assignment import Chain
from router.plan import SequenceView, Span
from router.prompt_features import prompt_features

# Replies that come later than this many rounds do not count in a drafter's reply time.
MAX_TOLD = 8


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A request under way. ``token_ids[:computed_len]`` are in the target's cache."""

    request: Request
    token_ids: list[int]
    features: tuple[float, ...] = ()  # of the prompt, for the router
    ends: frozenset[int] = frozenset()  # tokens that end it
    computed_len: int = 0
    running: bool = False
    chain: Chain = ()  # of pool members, nearest to the target last
    drafter: str | None = None  # the last of them, which follows it
    awaiting_since_s: float | None = None
    can_have_draft: bool = False  # in its next round: a drafter followed it at its last commit, asked or not
    held: bool = False  # for its proposal, by the last plan
    told_s: dict[int, float] = field(default_factory=dict)  # committed length -> when the drafter was told of it
    proposal: Proposal | None = None
    survival: tuple[float, ...] = ()  # of the prefixes of the proposal, as far as its drafter is known
    judgement: Judgement | None = None  # by the last pass
    arrived_s: float = 0.0  # at this target
    admitted_s: float | None = None  # when its first pass began; None: it waits for that
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held then
    finish: FinishReason | None = None

    # Of the request; a round asks for them several times.
    prompt_len: int = field(init=False)
    end_len: int = field(init=False)  # at which it has all the tokens that it may have
    teaches: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)
        self.end_len = self.prompt_len + self.request.sampling.max_tokens
        self.teaches = self.request.teaches

    @property
    def max_new_tokens(self) -> int:
        return self.end_len - len(self.token_ids)

    def expect_nothing(self) -> None:
        """Of the drafter, which is yet to be told of the request, or of what is committed."""
        self.awaiting_since_s = None
        self.can_have_draft = False

    def await_proposal(self, now_s: float) -> None:
        """The drafter is being told of what is committed now."""
        self.awaiting_since_s = now_s
        self.told_s[len(self.token_ids)] = now_s
        if len(self.told_s) > MAX_TOLD:
            del self.told_s[next(iter(self.told_s))]

    def admit(self, num_cached_tokens: int, now_s: float) -> None:
        """Its pass begins. The first counts: later ones are of a request that was preempted and is computed again."""
        self.computed_len = num_cached_tokens
        self.running = True
        if self.admitted_s is None:
            self.admitted_s = now_s
            self.num_cached_tokens = num_cached_tokens

    def prefill(self, now_s: float) -> Prefill:
        """Of its first commit, which is made now. Raises AssertionError for a request that was never admitted."""
        assert self.admitted_s is not None
        return Prefill(self.num_cached_tokens, self.admitted_s - self.arrived_s, now_s - self.admitted_s)

    def view(self) -> SequenceView:
        proposal = self.proposal
        return SequenceView(
            request_id=self.request.id,
            committed_len=len(self.token_ids),
            computed_len=self.computed_len,
            prompt_len=self.prompt_len,
            num_drafted=len(proposal.token_ids) if proposal else 0,
            confidences=proposal.confidences if proposal else (),
            running=self.running,
            arrival_s=self.request.arrival_s,
            slo=self.request.slo,
            drafter=self.drafter,
            awaiting_since_s=self.awaiting_since_s,
            max_new_tokens=self.max_new_tokens,
            survival=self.survival if proposal else (),
        )


@dataclass(slots=True)
class Sequences:
    """All live requests in order of arrival."""

    model: ModelInfo
    _live: dict[str, LiveSequence] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._live.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: str) -> LiveSequence:
        return self._live[request_id]

    def get(self, request_id: str) -> LiveSequence | None:
        return self._live.get(request_id)

    def snapshot(self) -> tuple[LiveSequence, ...]:
        """For readers on other threads: the copy is made in one step of the interpreter."""
        return tuple(self._live.values())

    @property
    def num_running(self) -> int:
        return sum(s.running for s in self._live.values())

    def add(self, request: Request, now_s: float = 0.0) -> LiveSequence:
        # The router does not choose for those that chose themselves.
        features = prompt_features(request.prompt_token_ids) if request.chain is None else ()
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self.model.eos_token_ids)
        sequence = LiveSequence(request, list(request.prompt_token_ids), features, ends, arrived_s=now_s)
        self._live[request.id] = sequence
        return sequence

    def remove(self, request_id: str) -> LiveSequence | None:
        return self._live.pop(request_id, None)

    def views(self) -> list[SequenceView]:
        return [s.view() for s in self._live.values()]

    def offer(self, proposal: Proposal) -> bool:
        """Takes a sound proposal (`cluster.soundness`) for what is committed. One that comes late is cut to what is still
        ahead, if what was committed meanwhile agrees with it; any other is dropped. Returns whether it was taken."""
        sequence = self._live.get(proposal.request_id)
        if sequence is None or sequence.drafter != proposal.drafter:
            return False
        lag = len(sequence.token_ids) - proposal.base_len
        if lag < 0 or proposal.base_len < sequence.prompt_len:
            return False
        if lag > 0:
            agrees = proposal.token_ids[:lag] == tuple(sequence.token_ids[proposal.base_len :])
            if sequence.proposal is not None or not agrees or lag >= len(proposal.token_ids):
                return False
            proposal = replace(
                proposal,
                base_len=len(sequence.token_ids),
                token_ids=proposal.token_ids[lag:],
                confidences=proposal.confidences[lag:],
            )
        sequence.proposal = proposal
        sequence.survival = ()
        sequence.awaiting_since_s = None
        return True

    def span_input(self, span: Span) -> SpanInput:
        """The tokens of a planned span. A cached prefix may have shortened what is left to compute since it was planned."""
        sequence = self._live[span.request_id]
        end = min(sequence.computed_len + span.num_compute, len(sequence.token_ids))
        samples = end == len(sequence.token_ids)
        drafts: tuple[int, ...] = ()
        if samples and sequence.proposal is not None:
            drafts = sequence.proposal.token_ids[: span.num_verify]
        return SpanInput(
            request_id=span.request_id,
            base_len=sequence.computed_len,
            token_ids=(*sequence.token_ids[sequence.computed_len : end], *drafts),
            num_drafts=len(drafts),
            samples=samples,
        )

    def apply(self, span: SpanInput, outcome: SpanOutcome) -> Commit | None:
        """Commits what a pass found, and ends the sequence where it must end. None for a prefill chunk.

        Tokens beyond a stop token or the last wanted one are cut off: they were verified in the same pass, but a plain
        decode would never have computed them.
        """
        sequence = self._live[span.request_id]
        if outcome.error is not None:
            sequence.finish, sequence.judgement = FinishReason.ERROR, None
            return Commit(span.request_id, len(sequence.token_ids), (), finish=sequence.finish, error=outcome.error)
        if not span.samples:
            sequence.computed_len = span.base_len + len(span.token_ids)
            return None
        base_len = len(sequence.token_ids)
        token_ids, finish = self._until_end(sequence, outcome.token_ids)
        sequence.token_ids.extend(token_ids)
        sequence.computed_len = len(sequence.token_ids) - 1
        sequence.finish = finish
        drafter = self._judge(sequence, token_ids)
        return Commit(
            request_id=span.request_id,
            base_len=base_len,
            token_ids=token_ids,
            num_proposed=span.num_drafts,
            num_accepted=min(outcome.num_accepted, len(token_ids)),
            drafter=drafter,
            logprobs=outcome.logprobs[: len(token_ids)],
            finish=finish,
        )

    @staticmethod
    def _judge(sequence: LiveSequence, token_ids: tuple[int, ...]) -> str | None:
        """Holds the proposal at hand against what was committed, keeps what is still ahead of it, and says whose it was."""
        proposal, sequence.proposal = sequence.proposal, None
        if proposal is None:
            sequence.judgement = None
            return None
        drafts = proposal.token_ids
        num_right = 0
        for drafted, token in zip(drafts, token_ids, strict=False):
            if drafted != token:
                break
            num_right += 1
        num_judged = min(num_right + 1, len(drafts), len(token_ids))
        sequence.judgement = Judgement(proposal.drafter, proposal.confidences[:num_judged], num_right, proposal.unfinished)
        if num_right == len(token_ids) < len(drafts):
            sequence.proposal = replace(
                proposal,
                base_len=proposal.base_len + num_right,
                token_ids=drafts[num_right:],
                confidences=proposal.confidences[num_right:],
            )
            sequence.survival = tuple(s / max(sequence.survival[num_right - 1], 1e-9) for s in sequence.survival[num_right:])
        return proposal.drafter

    def _until_end(self, sequence: LiveSequence, token_ids: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        room = min(sequence.max_new_tokens, self.model.max_model_len - len(sequence.token_ids))
        if not sequence.ends.isdisjoint(token_ids[:room]):
            num = 1 + next(i for i, token in enumerate(token_ids) if token in sequence.ends)
            return tuple(token_ids[:num]), FinishReason.STOP
        if len(token_ids) >= room:
            return tuple(token_ids[:room]), FinishReason.LENGTH
        return tuple(token_ids), None
