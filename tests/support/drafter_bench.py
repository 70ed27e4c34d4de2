"""A drafter's loop without a target: a link that records, a drafter that counts, a manual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.messages import DraftRound, Extend, Hello, Message, Open, ProposalRound, Role
from cluster.sampling_params import SamplingParams
from cluster.transport.base import LinkUp, Mailbox, Received
from cluster.types import Proposal
from drafters.loop import DrafterLoop
from drafters.protocol import Capabilities, Demand, Draft
from drafters.sessions import SessionLimits

SAMPLING = SamplingParams(max_tokens=1000)


@dataclass(eq=False)
class FakeLink:
    """The drafter's end of a link; records what is sent."""

    name: str = "target"
    sent: list[ProposalRound] = field(default_factory=list)
    refuses: type[Exception] | None = None
    closed: bool = False

    @property
    def peer(self) -> Hello:
        return Hello(Role.TARGET, self.name, 100, "fingerprint")

    def send(self, message: Message) -> None:
        if self.refuses is not None:
            raise self.refuses("refused")
        assert isinstance(message, ProposalRound)
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[Proposal]:
        """The proposals since the last call."""
        proposals = [proposal for message in self.sent for proposal in message.proposals]
        self.sent.clear()
        return proposals

    def take_resyncs(self) -> list[str]:
        resyncs = [request_id for message in self.sent for request_id in message.resyncs]
        self.sent.clear()
        return resyncs


@dataclass
class Counting:
    """A drafter that counts on: the token at position t is t, up to ``limit`` tokens a draft."""

    limit: int = 1000
    texts: dict[str, list[int]] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)
    batches: list[list[Demand]] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None  # happens during the next batch
    capabilities = Capabilities()

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.texts[request_id] = list(token_ids)
        self.salts[request_id] = salt

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id].extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.batches.append(list(demands))
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        drafts = []
        for demand in demands:
            start = len(self.texts[demand.request_id]) + len(demand.ahead)
            num_tokens = min(demand.num_tokens, self.limit)
            drafts.append(Draft(demand.request_id, tuple(range(start, start + num_tokens)), (0.5,) * num_tokens))
        return drafts

    def release(self, request_id: str) -> None:
        del self.texts[request_id]  # the loop releases what it opened, once

    def check_integrity(self) -> None:
        pass


class Bench:
    """A loop, its drafter, one link, and a clock that the test moves."""

    def __init__(self, *, ahead_len: int = 0, limit: int = 1000, drafter: Counting | None = None, **limits: float) -> None:
        self.mailbox = Mailbox()
        self.drafter = drafter or Counting(limit)
        self.loop = DrafterLoop(
            "counting", self.drafter, self.mailbox, SessionLimits(**{"max_draft_len": 4, **limits}), ahead_len=ahead_len
        )
        self.link = FakeLink()
        self.now_s = 0.0
        self.mailbox.put(LinkUp(self.link))

    def mail(self, link: FakeLink | None = None, **content: object) -> None:
        self.mailbox.put(Received(link or self.link, DraftRound(**{"table_version": 1, **content})))

    def open(
        self, request_id: str, length: int, max_tokens: int = 1000, link: FakeLink | None = None, salt: str = ""
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.mail(link, opens=(Open(request_id, tuple(range(length)), length, sampling, cache_salt=salt),))

    def extend(self, request_id: str, base_len: int, *token_ids: int) -> None:
        self.mail(extends=(Extend(request_id, base_len, token_ids),))

    def step(self) -> bool:
        done = self.loop.step(self.now_s)
        self.loop.check_integrity()
        return done

    def settle(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the loop never comes to rest")
