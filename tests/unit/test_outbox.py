"""What the round tells drafters and gateways: in messages that links carry, and nothing lost while they are full."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.errors import LinkClosed, LinkFull, WireError
from cluster.messages import Budget, CommitRound, DraftRound, Hello, Message, Role
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.types import Adapter, Commit, DraftTerms, Request
from engine import outbox
from engine.outbox import DrafterOutbox, GatewayOutbox
from engine.sequences import LiveSequence


class FakeLink:
    """Takes messages as ``behave`` lets it."""

    def __init__(self, behave: Callable[[Message], None] = lambda _: None) -> None:
        self.peer = Hello(Role.DRAFTER, "d", 8, "f")
        self.sent: list[Message] = []
        self.behave = behave
        self.closed = False

    def send(self, message: Message) -> None:
        self.behave(message)
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


def refuse(error: Exception) -> Callable[[Message], None]:
    def behave(_: Message) -> None:
        raise error

    return behave


def sequence(name: str, num_tokens: int = 4) -> LiveSequence:
    request = Request(name, (1,) * num_tokens, SamplingParams(max_tokens=9), 0.0)
    return LiveSequence(request, list(request.prompt_token_ids))


def test_a_drafter_learns_of_each_adapter_apart() -> None:
    link, one = FakeLink(), sequence("a")
    one.request = replace(one.request, cache_salt="s", adapter=Adapter("sql", "/sql", "key-"))
    port = DrafterOutbox(link)
    port.open(one)
    port.flush(1)
    (message,) = link.sent
    assert isinstance(message, DraftRound)
    assert message.opens[0].cache_salt == "key-s"


def test_a_drafter_that_comes_back_is_told_everything_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_OPENED_TOKENS", 10)
    link = FakeLink()
    port = DrafterOutbox(link)
    for i in range(5):
        port.open(sequence(f"r{i}"))
    port.open(sequence("huge", 50))
    port.release("gone")
    port.flush(3)
    messages = [m for m in link.sent if isinstance(m, DraftRound)]
    assert [len(m.opens) for m in messages] == [2, 2, 1, 1]
    assert [b.request_id for m in messages for b in m.budgets] == [o.request_id for m in messages for o in m.opens]
    assert messages[0].releases == ("gone",)
    port.flush(4)
    assert len(link.sent) == 4, "nothing is said twice"


def test_drafters_are_not_sent_the_grammar() -> None:
    link, grammar = FakeLink(), Grammar(GrammarKind.REGEX, "a+")
    port = DrafterOutbox(link)
    port.open(LiveSequence(Request("r", (1, 2), SamplingParams(max_tokens=9, seed=4, grammar=grammar), 0.0), [1, 2]))
    port.flush(1)
    (message,) = link.sent
    assert isinstance(message, DraftRound)
    assert message.opens[0].sampling == SamplingParams(max_tokens=9, seed=4)


def commit(one: LiveSequence, port: DrafterOutbox, *token_ids: int) -> None:
    one.token_ids.extend(token_ids)
    port.extend(one.request.id)


def test_what_a_full_link_refused_goes_with_the_next_round() -> None:
    link, a, b = FakeLink(), sequence("a"), sequence("b", 7)
    port = DrafterOutbox(link)
    port.open(b)
    port.flush(1)
    link.behave = refuse(LinkFull("slow"))
    port.open(a)
    port.flush(1)
    commit(a, port, 5)
    commit(b, port, 1)
    port.flush(1)
    commit(b, port, 2, 3)
    assert port.num_unsent() == 5 + 3
    link.behave = lambda _: None
    port.flush(2)
    message = link.sent[-1]
    assert isinstance(message, DraftRound)
    assert [one.token_ids for one in message.opens] == [(1, 1, 1, 1, 5)]
    (extend,) = message.extends
    assert (extend.base_len, extend.token_ids) == (7, (1, 2, 3))
    commit(a, port, 6)
    port.flush(3)
    assert isinstance(link.sent[-1], DraftRound)
    assert [(one.base_len, one.token_ids) for one in link.sent[-1].extends] == [(5, (6,))]
    assert port.num_unsent() == 0
    commit(a, port, 7)
    port.flush(4)
    assert isinstance(link.sent[-1], DraftRound)
    assert [(one.base_len, one.token_ids) for one in link.sent[-1].extends] == [(6, (7,))]


def test_a_request_that_is_opened_anew_is_not_extended_too() -> None:
    link, one = FakeLink(), sequence("a")
    port = DrafterOutbox(link)
    port.open(one)
    port.flush(1)
    commit(one, port, 5)
    port.open(one)
    commit(one, port, 6)
    port.flush(2)
    message = link.sent[-1]
    assert isinstance(message, DraftRound)
    assert [opened.token_ids for opened in message.opens] == [(1, 1, 1, 1, 5, 6)]
    assert not message.extends
    port.flush(3)
    assert len(link.sent) == 2


def test_who_only_keeps_in_step_is_told_of_no_drafters_ahead_of_it() -> None:
    link, one = FakeLink(), sequence("a")
    one.draft.switch(("small", "d"))
    port = DrafterOutbox(link)
    for open_session, proposers in ((port.open, ("small",)), (port.open_for_scoring, ())):
        open_session(one)
        port.flush(1)
        message = link.sent[-1]
        assert isinstance(message, DraftRound)
        assert message.opens[0].proposers == proposers


def test_a_new_bound_reaches_those_that_are_followed() -> None:
    link = FakeLink()
    port = DrafterOutbox(link)
    port.open(sequence("a"))
    port.flush(1)
    port.set_budget("a", DraftTerms(3, 0.5))
    port.flush(2)
    assert isinstance(link.sent[-1], DraftRound)
    assert link.sent[-1].budgets == (Budget("a", DraftTerms(3, 0.5)),)


@pytest.mark.parametrize("error", [WireError("too many bytes"), LinkClosed("gone")])
def test_a_message_that_cannot_be_sent_ends_its_link_and_nothing_else(error: Exception) -> None:
    port = DrafterOutbox(FakeLink(refuse(error)))
    port.open(sequence("a"))
    with pytest.raises(LinkClosed):
        port.flush(1)
    gateway = GatewayOutbox(FakeLink(refuse(error)))
    gateway.publish(Commit("a", 0, (1,)))
    with pytest.raises(LinkClosed):
        gateway.flush()


def test_who_never_reads_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING_RELEASES", 3)
    monkeypatch.setattr(outbox, "MAX_PENDING_COMMITS", 3)
    link = FakeLink(refuse(LinkFull("slow")))
    port, gateway = DrafterOutbox(link), GatewayOutbox(link)
    for i in range(3):
        port.release(f"r{i}")
        gateway.publish(Commit(f"r{i}", 0, (1,)))
        port.flush(1)
        gateway.flush()
    assert not link.closed
    port.release("r3")
    with pytest.raises(LinkClosed, match="4 releases unread"):
        port.flush(1)
    gateway.publish(Commit("r3", 0, (1,)))
    with pytest.raises(LinkClosed, match="4 commits unread"):
        gateway.flush()
    assert link.closed


def test_commits_go_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_COMMITS", 2)
    link = FakeLink()
    gateway = GatewayOutbox(link)
    for i in range(5):
        gateway.publish(Commit(str(i), 0, (1,)))
    gateway.flush()
    assert [len(m.commits) for m in link.sent if isinstance(m, CommitRound)] == [2, 2, 1]
