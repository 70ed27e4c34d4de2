"""The gateway of a simulated cluster: requests out, commits in, and what each request got."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from cluster.messages import CommitRound, Hello, Message, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport.base import LinkUp, Received
from cluster.types import Commit, FinishReason, Request
from simulator.agreement import SimulatedRequest
from simulator.links import Events, VirtualLink
from simulator.target import SimulatedTarget
from simulator.text import AnswerText, Script


@dataclass(slots=True, eq=False)
class Served:
    """A request, and what came of it so far. ``finish``: how it ended, or why it was refused; None: it is under way."""

    request: SimulatedRequest
    first_token_s: float = 0.0  # once there are tokens, or it has ended
    end_s: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    num_verified: int = 0  # draft tokens
    finish: FinishReason | None = None


class SimulatedGateway:
    """Owns the scripts of all requests. ``ended`` is told of each that ends."""

    def __init__(self, events: Events, ended: Callable[[Served], None]) -> None:
        self.open: dict[str, Served] = {}
        self.scripts: dict[str, Script] = {}
        self.num_tokens = 0
        self._events = events
        self._ended = ended
        self._text = AnswerText()
        self._links: dict[SimulatedTarget, VirtualLink] = {}
        self._target_of: dict[str, SimulatedTarget] = {}  # of open requests

    def link(self, target: SimulatedTarget, own: Hello, targets: Hello) -> None:
        at_target, here = VirtualLink(self._events, own, None), VirtualLink(self._events, targets, None)
        at_target.connect(self._receive)
        here.connect(lambda message: _put(target, at_target, message))
        target.mailbox.put(LinkUp(at_target))
        self._links[target] = here

    def submit(self, request: SimulatedRequest) -> None:
        """To the target with the fewest requests."""
        self.scripts[request.id] = Script.of(request, self._text)
        target = self._target_of[request.id] = min(self._links, key=lambda target: target.num_open)
        target.num_open += 1
        self.open[request.id] = Served(request)
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
        if not one.num_rounds and (commit.token_ids or commit.finish is not None):
            one.first_token_s = now_s
        if commit.token_ids:
            one.num_tokens += len(commit.token_ids)
            one.num_rounds += 1
            one.num_verified += commit.num_proposed
            self.num_tokens += len(commit.token_ids)
        if commit.finish is not None:
            one.finish, one.end_s = commit.finish, now_s
            del self.open[commit.request_id]
            self._target_of.pop(commit.request_id).num_open -= 1
            self._ended(one)


def _put(target: SimulatedTarget, link: VirtualLink, message: Message) -> None:
    target.mailbox.put(Received(link, message))


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, seed=0)
