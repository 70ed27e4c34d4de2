"""The gateway of a simulated cluster: requests out, commits in, and what each request got."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from cluster.messages import CommitRound, Hello, Message, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport.base import LinkUp, Received
from cluster.types import Commit, FinishReason, Request
from simulator.agreement import SimulatedRequest
from simulator.events import Events
from simulator.links import VirtualLink
from simulator.target import SimulatedTarget
from simulator.text import AnswerText, Script


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that came to its end. ``finish``: how, or why it was refused."""

    request: SimulatedRequest
    finish: FinishReason
    first_token_s: float
    end_s: float
    num_tokens: int
    num_rounds: int
    num_verified: int  # draft tokens


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request under way."""

    request: SimulatedRequest
    target: SimulatedTarget
    first_token_s: float | None = None
    num_tokens: int = 0
    num_rounds: int = 0
    num_verified: int = 0


class SimulatedGateway:
    """Owns the scripts of all requests. ``ended`` is told of each that ends."""

    def __init__(self, events: Events, ended: Callable[[Finished], None]) -> None:
        self.open: dict[str, OpenRequest] = {}
        self.scripts: dict[str, Script] = {}
        self.num_tokens = 0
        self._events = events
        self._ended = ended
        self._text = AnswerText()
        self._links: dict[SimulatedTarget, VirtualLink] = {}

    def link(self, target: SimulatedTarget, own: Hello, targets: Hello) -> None:
        at_target, here = VirtualLink(self._events, own, None), VirtualLink(self._events, targets, None)
        at_target.connect(self._receive)
        here.connect(lambda message: _put(target, at_target, message))
        target.mailbox.put(LinkUp(at_target))
        self._links[target] = here

    def submit(self, request: SimulatedRequest) -> None:
        """To the target with the fewest requests."""
        self.scripts[request.id] = Script.of(request, self._text)
        target = min(self._links, key=_num_open)
        target.num_open += 1
        self.open[request.id] = OpenRequest(request, target)
        sampling = _sampling(request.max_tokens)
        prompt = self._text.ids[: request.prompt_len]
        submitted = Request(request.id, prompt, sampling, request.arrival_s, request.slo, request.chain)
        self._links[target].send(SubmitRound(submits=(submitted,)))

    def _receive(self, message: Message) -> None:
        assert isinstance(message, CommitRound)
        for commit in message.commits:
            self._commit(commit, self._events.now_s)

    def _commit(self, commit: Commit, now_s: float) -> None:
        one = self.open[commit.request_id]
        if commit.token_ids:
            one.num_tokens += len(commit.token_ids)
            one.num_rounds += 1
            one.num_verified += commit.num_proposed
            self.num_tokens += len(commit.token_ids)
            if one.first_token_s is None:
                one.first_token_s = now_s
        if commit.finish is not None:
            del self.open[commit.request_id]
            one.target.num_open -= 1
            first_s = now_s if one.first_token_s is None else one.first_token_s
            self._ended(
                Finished(
                    one.request,
                    commit.finish,
                    first_s,
                    now_s,
                    num_tokens=one.num_tokens,
                    num_rounds=one.num_rounds,
                    num_verified=one.num_verified,
                )
            )


def _put(target: SimulatedTarget, link: VirtualLink, message: Message) -> None:
    target.mailbox.put(Received(link, message))


def _num_open(target: SimulatedTarget) -> int:
    return target.num_open


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, seed=0)
