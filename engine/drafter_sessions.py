"""The drafters as the round sees them: who is linked, who follows which request, what they are told and what they say."""

import logging
from collections.abc import Collection, Mapping, Sequence

from cluster.errors import LinkClosed
from cluster.messages import LevelReport, ProposalRound, Score
from cluster.transport.base import Link
from cluster.types import Commit, RoutingTable
from engine.outbox import DrafterPort
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router.assignment import Chain, drafter_of
from router.colocation_gate import Asking, saved_s
from router.cost_model import CostModel
from router.plan import DrafterView

logger = logging.getLogger(__name__)


class Pool:
    """Not thread-safe: the round owns it. A request whose drafter is not linked is decoded plainly until it is."""

    def __init__(
        self,
        sequences: Sequences,
        telemetry: Telemetry,
        table: RoutingTable,
        companions: Sequence[str] = (),
        proposers: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.table = table
        self._sequences = sequences
        self._telemetry = telemetry
        self._ports: dict[str, DrafterPort] = {}
        self._proposers = proposers or {}
        self._num_routed = 0
        self._asking = {name: Asking() for name in companions}
        self._batch = 1  # requests that the last choice was for

    def views(self) -> dict[str, DrafterView]:
        """What is known of each linked drafter."""
        return {name: self._telemetry.drafter(name).view for name in self._ports}

    def followed(self) -> tuple[tuple[str, int], ...]:
        """Linked drafters and how many requests each follows."""
        return tuple((name, len(port.followed) - len(port.shadows)) for name, port in self._ports.items())

    # ---- links

    def link_up(self, link: Link) -> None:
        """A drafter came, or came back: it takes the place of a former one of its name, and follows what that followed."""
        name = link.peer.name
        former = self._ports.get(name)
        if former is not None and former.link is not link:
            former.link.close()
        port = self._ports[name] = DrafterPort(link)
        self._telemetry.drafter(name).restarted()
        for sequence in self._sequences:
            if sequence.drafter == name:
                port.open(sequence, self.table.max_draft_len)
                sequence.expect_nothing()
            elif name in self._scorers(sequence):
                port.shadow(sequence)
        logger.info("drafter %s is up", name)

    def link_down(self, link: Link, reason: str) -> None:
        name = link.peer.name
        port = self._ports.get(name)
        if port is None or port.link is not link:
            return  # a newer link has taken its place
        del self._ports[name]
        for sequence in self._sequences:
            if sequence.drafter == name:
                sequence.expect_nothing()
                self._telemetry.forget(sequence.request.id)
        logger.warning("drafter %s is down: %s", name, reason)

    def knows(self, link: Link) -> bool:
        port = self._ports.get(link.peer.name)
        return port is not None and port.link is link

    def leave_out(self, name: str, reason: str) -> None:
        """Hang up on a drafter."""
        port = self._ports.get(name)
        if port is not None:
            port.link.close()
            self.link_down(port.link, reason)

    # ---- what they say

    def hear(self, link: Link, message: ProposalRound, now_s: float, unread_since_s: float | None = None) -> tuple[str, ...]:
        """Takes what is sound (`cluster.soundness`), of a link that it knows.

        Returns what contradicts what the drafter was told, and was left out.

        Args:
            unread_since_s: since when nobody has looked for mail; None: it has come just now.
        """
        name = link.peer.name
        port = self._ports[name]
        stats = self._telemetry.drafter(name)
        taken, faults = [], []
        for proposal in message.proposals:
            if proposal.drafter != name:
                faults.append(f"a proposal in the name of {proposal.drafter!r}")
                continue
            sequence = self._sequences.get(proposal.request_id)
            if sequence is None or proposal.request_id not in port.followed:
                port.release(proposal.request_id)
                continue
            told_s = sequence.told_s.get(proposal.base_len)
            # A stale reply tells how long drafting takes, too. An empty one does not: a full drafter sends it at once.
            if told_s is not None and proposal.token_ids:
                at_least_s = None if unread_since_s is None else max(0.0, unread_since_s - told_s)
                stats.replied(now_s - told_s, at_least_s)
            if self._sequences.offer(proposal):
                taken.append(sequence)
            else:
                stats.num_stale += 1
        drafts = [sequence.proposal.confidences for sequence in taken if sequence.proposal is not None]
        for sequence, survival in zip(taken, stats.foresee(drafts), strict=True):
            sequence.survival = survival
        self._telemetry.note_levels([level for level in message.levels if self._is_own(level, name, faults)])
        self._telemetry.note_scores(name, [score for score in message.scores if self._is_possible(score, faults)])
        for request_id in message.resyncs:
            stats.num_resyncs += 1
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.drafter == name:
                port.open(sequence, self.table.max_draft_len)
            elif sequence is not None and request_id in port.shadows:
                port.shadow(sequence)
            else:
                port.release(request_id)
        return tuple(faults)

    def _is_own(self, level: LevelReport, name: str, faults: list[str]) -> bool:
        """A drafter's process reports on its own model and on those that ride ahead of it there, for any target."""
        own = drafter_of(name)
        if level.drafter == own or level.drafter in self._proposers.get(own, ()):
            return True
        faults.append(f"a report of the passes of {level.drafter!r}, which does not run there")
        return False

    def _is_possible(self, score: Score, faults: list[str]) -> bool:
        """A score cannot cover uncommitted tokens. For an ended request this cannot be checked."""
        sequence = self._sequences.get(score.request_id)
        if sequence is None or score.base_len + score.num_matched <= len(sequence.token_ids):
            return True
        faults.append(f"a score up to {score.base_len + score.num_matched} of {len(sequence.token_ids)} tokens")
        return False

    # ---- whether companions are asked: the target waits while they draft

    def is_asked(self, name: str) -> bool:
        """One that is not is told nothing meanwhile: its port keeps what it is to be told."""
        asking = self._asking.get(name)
        return asking is None or asking.is_asked or not self._sequences

    def choose(self, batch: int) -> None:
        """Who is asked for the drafts of the next round of ``batch`` requests."""
        for asking in self._asking.values():
            asking.decide(batch)
        self._batch = batch

    def drafted(self, name: str, seconds: float) -> None:
        """The companion took so long, to follow what was committed and to draft."""
        self._asking[name].drafted(self._batch, seconds)

    def handled(self, seconds: float) -> None:
        """The round took so long beside the pass and what the companions did."""
        for asking in self._asking.values():
            asking.handled(self._batch, seconds)

    def weigh(self, commits: Sequence[Commit], batch: int, num_context: int, cost: CostModel) -> None:
        """What companions' drafts have saved in a pass over ``batch`` sequences."""
        for name, asking in self._asking.items():
            own = [commit for commit in commits if commit.drafter == name]
            if own:
                num_verified = sum(commit.num_proposed for commit in own)
                num_accepted = sum(commit.num_accepted for commit in own)
                asking.came_true(batch, saved_s(batch, num_verified, num_accepted, num_context, cost))

    # ---- who follows whom

    def follow(self, table: RoutingTable) -> None:
        """Takes up a newer routing table: requests whose chain changed are handed from one drafter to the other."""
        if table is self.table:
            return
        former_len, former_scorers = self.table.max_draft_len, self.table.scorers
        self.table = table
        if table.max_draft_len != former_len:
            for port in self._ports.values():
                port.budget(table.max_draft_len)
        for sequence in self._sequences:
            if sequence.request.chain is None:
                chain = table.chains.get(sequence.request.id)
                if chain is not None and chain != sequence.chain:
                    self._switch(sequence, chain)
            if table.scorers != former_scorers:
                self._see_to_shadows(sequence)

    def seat(self, sequence: LiveSequence) -> None:
        """A drafter for a new request: its own choice, the table's, or the next of the table's defaults."""
        chain = sequence.request.chain
        if chain is None:
            defaults = self.table.defaults
            chain = self.table.chains.get(sequence.request.id, defaults[self._num_routed % len(defaults)])
            self._num_routed += 1
        self._switch(sequence, chain)

    def tell(self, sequence: LiveSequence, commit: Commit, now_s: float) -> None:
        """What was committed, to whoever follows it. A request that wants one more token wants no drafts for it."""
        port = self._port_of(sequence)
        if port is not None:
            name = port.link.peer.name
            if sequence.teaches and commit.error is None:  # a pass that failed says nothing
                missed = sequence.judgement is None and sequence.can_have_draft
                self._telemetry.observe(commit, name, now_s, sequence.judgement, self.table.max_draft_len, missed)
        sequence.expect_nothing()
        if commit.finish is None and sequence.max_new_tokens > 1:
            for one in self._ports.values():
                if commit.request_id in one.followed:
                    one.extend(commit.request_id, commit.base_len, commit.token_ids)
            if port is not None:
                sequence.can_have_draft = True
                if self.is_asked(port.link.peer.name):
                    sequence.await_proposal(now_s)

    def release(self, sequence: LiveSequence) -> None:
        """Nobody needs to follow it any more."""
        request_id = sequence.request.id
        self._telemetry.forget(request_id)
        own = self._port_of(sequence)
        for port in self._ports.values():
            if port is own or request_id in port.followed:
                port.release(request_id)

    def flush(self) -> None:
        """Sends every drafter what it is to be told now."""
        for name, port in tuple(self._ports.items()):
            if not self.is_asked(name):
                continue
            try:
                port.flush(self.table.version)
            except LinkClosed as gone:
                self.link_down(port.link, str(gone))

    def _switch(self, sequence: LiveSequence, chain: Chain) -> None:
        """Hands a request to the last drafter of a chain, in whose process the others ride ahead of it.

        Where that drafter stays, so does its proposal: the same would come from it behind any others.
        """
        drafter = chain[-1] if chain else None
        request_id, max_draft_len = sequence.request.id, self.table.max_draft_len
        former = self._port_of(sequence)
        moves = drafter != sequence.drafter
        sequence.chain, sequence.drafter = chain, drafter
        if moves:
            self._telemetry.forget(request_id)
            sequence.proposal = None
            sequence.expect_nothing()
            if former is not None:
                if former.link.peer.name in self._scorers(sequence):
                    former.shift(request_id, 0)
                else:
                    former.release(request_id)
        port = self._port_of(sequence)
        if port is not None:
            if request_id in port.shadows and len(chain) == 1:  # it is in step, or nearly
                port.shift(request_id, max_draft_len)
            else:
                port.open(sequence, max_draft_len)
        self._see_to_shadows(sequence)

    def _scorers(self, sequence: LiveSequence) -> tuple[str, ...]:
        """Who is to keep in step with a request though another drafts for it; one whose chain is fixed goes nowhere, and of
        one that says nothing of drafters no scores are wanted."""
        if sequence.request.chain is not None or not sequence.teaches:
            return ()
        own = drafter_of(sequence.drafter) if sequence.drafter is not None else None
        return tuple(name for name in self.table.scorers if drafter_of(name) != own)

    def _see_to_shadows(self, sequence: LiveSequence) -> None:
        request_id, scorers = sequence.request.id, self._scorers(sequence)
        for name, port in self._ports.items():
            if name in scorers and request_id not in port.followed:
                port.shadow(sequence)
            elif name not in scorers and request_id in port.shadows:
                port.release(request_id)

    def _port_of(self, sequence: LiveSequence) -> DrafterPort | None:
        return self._ports.get(sequence.drafter) if sequence.drafter is not None else None
