"""The drafters of a target: which are linked, which follow each request, what they are sent and what they propose."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.errors import LinkClosed
from cluster.messages import DraftScore, LevelReport, ProposalRound
from cluster.transport.base import Link
from cluster.types import FREE_DRAFTERS, Commit, DraftTerms, RoutingTable
from engine.colocated import ColocatedDrafters
from engine.deferred_work import Later, at_once
from engine.draft_learning import DraftLearning, Offer
from engine.feature_feed import Feeds
from engine.outbox import DrafterOutbox
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router.assignment import Chain, drafter_of
from router.estimates.drafter_stats import Judgement
from router.plan import DrafterView, Span, StepPlan

logger = logging.getLogger(__name__)


class DrafterSessions:
    """Not thread-safe: the round owns it. A request whose drafter is not linked is decoded plainly until it is.
    ``proposers``: for each drafter, those that may ride ahead of it in its process; it may report on them."""

    def __init__(
        self,
        sequences: Sequences,
        telemetry: Telemetry,
        table: RoutingTable,
        colocated: ColocatedDrafters,
        proposers: Mapping[str, Collection[str]] | None = None,
        later: Later = at_once,
    ) -> None:
        self.table = table
        self.learning = DraftLearning(telemetry, colocated, later)
        self._sequences = sequences
        self._colocated = colocated
        self._outboxes: dict[str, DrafterOutbox] = {}
        self._proposers = proposers or {}
        self._num_assigned = 0  # by the table's defaults
        self._num_held = 0  # by the last plan
        self.feeds: Feeds | None = None  # of drafters in other processes that read hidden states

    def views(self) -> dict[str, DrafterView]:
        """What the planner knows of each linked drafter that drafts for a request."""
        return self.learning.views([name for name, num in self.num_followed() if num])

    def num_followed(self) -> tuple[tuple[str, int], ...]:
        """Linked drafters, and for how many requests each drafts. From any thread."""
        return tuple([(name, len(box.followed) - len(box.scoring)) for name, box in tuple(self._outboxes.items())])

    def wanted(self, spans: Iterable[Span]) -> set[str]:
        """Linked drafters that are to draft for requests of these spans."""
        drafts = [self._sequences[span.request_id].draft for span in spans if span.samples]
        return {draft.drafter for draft in drafts if draft.drafter in self._outboxes and draft.asked_budget.num_tokens}

    def num_unsent(self, name: str) -> int:
        """Tokens that a drafter has not been sent; 0 if it is not linked."""
        outbox = self._outboxes.get(name)
        return 0 if outbox is None else outbox.num_unsent()

    # ---- links

    def link_up(self, link: Link) -> None:
        """A drafter connected, or came back: it replaces a former one of its name, and follows that one's requests."""
        name = link.peer.name
        former = self._outboxes.get(name)
        if former is not None and former.link is not link:
            former.close()
        outbox = self._outboxes[name] = DrafterOutbox(link, None if self.feeds is None else self.feeds.of(link))
        self.learning.restarted(name)
        for sequence in self._sequences:
            if sequence.draft.drafter == name:
                outbox.open(sequence)
                sequence.draft.expect_nothing()
            elif name in self._scorers(sequence):
                outbox.open_for_scoring(sequence)
        logger.info("drafter %s is up", name)

    def link_down(self, link: Link, reason: str) -> None:
        name = link.peer.name
        if not self.knows(link):
            return  # a newer link has replaced it
        self._outboxes.pop(name).close()
        for sequence in self._sequences:
            if sequence.draft.drafter == name:
                sequence.draft.expect_nothing()
                self.learning.forget(sequence.request.id)
        logger.warning("drafter %s is down: %s", name, reason)

    def knows(self, link: Link) -> bool:
        outbox = self._outboxes.get(link.peer.name)
        return outbox is not None and outbox.link is link

    def disconnect(self, name: str, reason: str) -> None:
        outbox = self._outboxes.get(name)
        if outbox is not None:
            self.link_down(outbox.link, reason)

    # ---- what drafters send

    def receive(self, link: Link, message: ProposalRound, arrived_s: float, after_pass: bool = False) -> tuple[str, ...]:
        """Takes the sound message (`cluster.message_checks`) of a known link. Returns its faults: parts that contradict what
        the drafter was sent, and were ignored. ``after_pass``: it may have waited for the end of a pass."""
        name = link.peer.name
        outbox, faults, sequences = self._outboxes[name], list[str](), self._sequences
        offers: list[Offer] = []
        for proposal in message.proposals:
            sequence = sequences.get(proposal.request_id)
            if proposal.drafter != name:
                faults.append(f"a proposal in the name of {proposal.drafter!r}")
            elif sequence is None or proposal.request_id not in outbox.followed:
                outbox.release(proposal.request_id)
            else:
                offers.append((sequence, proposal, sequence.draft.offer(proposal)))
        if message.levels or message.scores:
            levels = tuple([level for level in message.levels if self._is_own(level, name, faults)])
            scores = tuple([score for score in message.scores if self._is_possible(score, faults)])
            message = replace(message, levels=levels, scores=scores)
        self.learning.predict_taken(name, offers)
        self.learning.received(name, message, offers, arrived_s, after_pass)
        for request_id in message.resyncs:
            self._reopen(request_id, name, outbox)
        return tuple(faults)

    def offer_free(self, sequence: LiveSequence) -> None:
        """After a commit: proposes a free draft of the request where it is expected to bring most. A drafter on the target's
        device drafts nothing meanwhile, once it is known what to expect of it."""
        draft = sequence.draft
        candidates, awaited_len = self.learning.candidates(draft, draft.free_drafts(sequence.request.id))
        draft.offer_free(candidates, awaited_len)
        is_free = draft.proposal is not None and draft.proposal.drafter in FREE_DRAFTERS
        outbox = self._outbox_of(sequence)
        on_device = draft.drafter is not None and self._colocated.shares_device(draft.drafter)
        if draft.displace(is_free and awaited_len > 0.0 and on_device) and outbox is not None:
            outbox.set_budget(sequence.request.id, draft.asked_budget)

    def _reopen(self, request_id: str, name: str, outbox: DrafterOutbox) -> None:
        """The drafter asks for a request anew."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.draft.drafter == name:
            outbox.open(sequence)
        elif sequence is not None and request_id in outbox.scoring:
            outbox.open_for_scoring(sequence)
        else:
            outbox.release(request_id)

    def _is_own(self, level: LevelReport, name: str, faults: list[str]) -> bool:
        """A drafter's process reports on its own model and on those that ride ahead of it there, for any target."""
        own = drafter_of(name)
        if level.drafter == own or level.drafter in self._proposers.get(own, ()):
            return True
        faults.append(f"a report of the passes of {level.drafter!r}, which does not run there")
        return False

    def _is_possible(self, score: DraftScore, faults: list[str]) -> bool:
        """A score cannot cover uncommitted tokens. For an ended request this cannot be checked."""
        sequence = self._sequences.get(score.request_id)
        if sequence is None or score.base_len + score.num_matched <= len(sequence.token_ids):
            return True
        faults.append(f"a score up to {score.base_len + score.num_matched} of {len(sequence.token_ids)} tokens")
        return False

    # ---- what drafters are sent

    def note_plan(self, plan: StepPlan, now_s: float) -> None:
        """Records which drafters were late: those whose holds ran out before the proposal came."""
        if self._num_held:
            for span in plan.spans:
                draft = self._sequences[span.request_id].draft
                held_since_s, waited_s = draft.held_since_s, draft.end_hold(now_s)
                if held_since_s is not None and draft.drafter is not None:
                    self.learning.held(draft.drafter, now_s - held_since_s, waited_s)
        for request_id, until_s in plan.held.items():
            self._sequences[request_id].draft.hold(now_s, until_s)
        self._num_held = sum(sequence.draft.is_held for sequence in self._sequences) if self._num_held or plan.held else 0

    def set_budgets(self, budgets: Mapping[str, DraftTerms]) -> None:
        """Sends new ones with the next message."""
        for request_id, budget in budgets.items():
            sequence = self._sequences[request_id]
            draft = sequence.draft
            if draft.set_budget(budget) and (outbox := self._outbox_of(sequence)) is not None:
                outbox.set_budget(request_id, draft.asked_budget)

    def publish(self, committed: Iterable[LiveSequence], now_s: float) -> None:
        """Queues what a pass committed for the drafters that follow its requests, except where one last token is left."""
        outboxes = self._outboxes
        scorers = [outbox for outbox in outboxes.values() if outbox.scoring] if self.table.scorers else ()
        queried = {name for name in outboxes if self._colocated.is_queried(name)}
        for sequence in committed:
            draft, request_id = sequence.draft, sequence.request.id
            outbox = None if draft.drafter is None else outboxes.get(draft.drafter)
            is_followed = sequence.finish is None and sequence.max_new_tokens > 1
            for one in scorers if is_followed else ():
                if one is not outbox and request_id in one.scoring:
                    one.extend(request_id)
            if not is_followed or outbox is None:
                draft.expect_nothing()
                continue
            outbox.extend(request_id)
            if draft.budget.num_tokens:
                draft.expect(now_s, draft.drafter in queried)
            else:
                draft.expect_nothing()

    def learn(self, commits: Sequence[tuple[LiveSequence, Commit]], now_s: float) -> dict[str, Judgement]:
        """From what came of the drafts of a pass that ended at ``now_s``, once it is published. Returns the verdicts, by
        request."""
        return self.learning.learn(commits, self._outboxes, bool(self.table.scorers), now_s)

    def release(self, sequence: LiveSequence) -> None:
        """The request has ended: closes its sessions."""
        request_id = sequence.request.id
        self.learning.forget(request_id)
        own = self._outbox_of(sequence)
        for outbox in self._outboxes.values():
            if outbox is own or request_id in outbox.followed:
                outbox.release(request_id)

    def flush(self) -> None:
        for name, outbox in tuple(self._outboxes.items()):
            try:
                if not self._sequences or self._colocated.is_queried(name):
                    outbox.flush(self.table.version)
                else:  # the rest waits; sessions of ended requests would stay in its memory
                    outbox.flush_releases(self.table.version)
            except LinkClosed as gone:
                self.link_down(outbox.link, str(gone))
            if outbox.feed is not None:
                self.learning.fed(name, outbox.feed)

    # ---- which drafter follows which request

    def follow(self, table: RoutingTable) -> None:
        """Takes up a newer routing table: hands over the requests whose chain changed."""
        if table is self.table:
            return
        former_scorers, self.table = self.table.scorers, table
        for sequence in self._sequences:
            if sequence.request.chain is None:
                chain = table.chains.get(sequence.request.id)
                if chain is not None and chain != sequence.draft.chain:
                    self._switch(sequence, chain)
            if table.scorers != former_scorers:
                self._update_scoring(sequence)

    def assign(self, sequence: LiveSequence) -> None:
        """Chooses the chain of a new request: its own, the table's, or the next of the table's defaults."""
        chain = sequence.request.chain
        if chain is None:
            defaults = self.table.defaults
            chain = self.table.chains.get(sequence.request.id, defaults[self._num_assigned % len(defaults)])
            self._num_assigned += 1
        self._switch(sequence, chain)

    def _switch(self, sequence: LiveSequence, chain: Chain) -> None:
        """Hands a request to the last drafter of a chain, in whose process the others ride ahead of it."""
        request_id = sequence.request.id
        former = self._outbox_of(sequence)
        if sequence.draft.switch(chain):
            self.learning.forget(request_id)
            if former is not None:
                if former.link.peer.name in self._scorers(sequence):
                    former.stop_drafting(request_id)
                else:
                    former.release(request_id)
        outbox = self._outbox_of(sequence)
        if outbox is not None:
            if request_id in outbox.scoring and len(chain) == 1:  # it is in step, or nearly
                outbox.start_drafting(request_id, sequence.draft.budget)
            else:
                outbox.open(sequence)
        self._update_scoring(sequence)

    def _scorers(self, sequence: LiveSequence) -> tuple[str, ...]:
        """The drafters to keep in step while another drafts; none for a fixed chain, or where nothing is to be learned."""
        if not self.table.scorers or sequence.request.chain is not None or not sequence.teaches:
            return ()
        own = drafter_of(sequence.draft.drafter) if sequence.draft.drafter is not None else None
        return tuple([name for name in self.table.scorers if drafter_of(name) != own])

    def _update_scoring(self, sequence: LiveSequence) -> None:
        request_id, scorers = sequence.request.id, self._scorers(sequence)
        for name, outbox in self._outboxes.items():
            if name in scorers and request_id not in outbox.followed:
                outbox.open_for_scoring(sequence)
            elif name not in scorers and request_id in outbox.scoring:
                outbox.release(request_id)

    def _outbox_of(self, sequence: LiveSequence) -> DrafterOutbox | None:
        drafter = sequence.draft.drafter
        return None if drafter is None else self._outboxes.get(drafter)
