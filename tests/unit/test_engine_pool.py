"""What the round makes of what its drafters say."""

from dataclasses import dataclass, field

import pytest

from cluster.messages import DraftRound, Hello, LevelReport, Message, ProposalRound, Role
from cluster.types import ModelInfo, Proposal, Request, RoutingTable, SamplingParams
from engine.pool import Pool
from engine.sequences import Sequences
from engine.telemetry import Telemetry

MODEL = ModelInfo("m", vocab_size=100, max_model_len=64, eos_token_ids=(9,), tokenizer_fingerprint="f")
PEER = Hello(Role.DRAFTER, "d", 100, "fingerprint")


@dataclass(eq=False)
class Link:
    """The target's end of a link to a drafter that keeps still."""

    peer: Hello = PEER
    sent: list[DraftRound] = field(default_factory=list)

    def send(self, message: Message) -> None:
        assert isinstance(message, DraftRound)
        self.sent.append(message)

    def close(self) -> None: ...


def test_an_empty_answer_says_nothing_of_how_long_drafting_takes() -> None:
    """A full drafter answers at once, for it does not draft."""
    sequences, telemetry = Sequences(MODEL), Telemetry()
    pool = Pool(sequences, telemetry, RoutingTable(version=0, defaults=(("d",),), max_draft_len=4))
    link = Link()
    pool.link_up(link)
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=20), arrival_s=0.0)
    pool.seat(sequences.add(request))
    sequence = sequences.get("r")
    assert sequence is not None
    sequence.await_proposal(10.0)
    pool.hear(link, ProposalRound(0, (Proposal("r", 3, (), (), "d"),)), 10.001)
    assert telemetry.drafter("d").reply_s is None
    pool.hear(link, ProposalRound(0, (Proposal("r", 3, (5,), (0.5,), "d"),)), 10.02)
    assert telemetry.drafter("d").reply_s == pytest.approx(0.02)


def test_a_chain_runs_at_its_last_drafter_and_a_proposal_outlives_a_change_below() -> None:
    sequences, telemetry = Sequences(MODEL), Telemetry()
    pool = Pool(sequences, telemetry, RoutingTable(version=0, defaults=(("a", "d"),), max_draft_len=4))
    link = Link()
    pool.link_up(link)
    sequence = sequences.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=20), arrival_s=0.0))
    pool.seat(sequence)
    pool.flush()
    assert [(opened.request_id, opened.proposers) for opened in link.sent.pop().opens] == [("r", ("a",))]
    assert (sequence.chain, sequence.drafter) == (("a", "d"), "d")
    level = LevelReport("d", 1, 5, 0.0, 0)
    pool.hear(link, ProposalRound(0, (Proposal("r", 3, (5,), (0.5,), "d"),), levels=(level,)), 10.02)
    assert telemetry.take_levels() == (level,)
    assert telemetry.take_levels() == ()
    pool.follow(RoutingTable(version=1, chains={"r": ("a", "b/1", "d")}))
    assert sequence.proposal is not None
    pool.flush()
    assert [(opened.token_ids, opened.proposers) for opened in link.sent[-1].opens] == [((1, 2, 3), ("a", "b"))]
    assert not link.sent[-1].releases
    pool.follow(RoutingTable(version=2, chains={"r": ("d", "a")}))
    assert sequence.proposal is None
    pool.flush()
    assert link.sent[-1].releases == ("r",)
