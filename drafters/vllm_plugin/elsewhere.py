"""Drafts of a drafter on another machine, beside the lookups here. vLLM waits for them no longer than they pay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from secrets import token_hex
from urllib.parse import parse_qsl

from cluster.config import TlsConfig
from cluster.errors import InvalidField
from cluster.messages import Hello, Role
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Mailbox
from cluster.transport.stream import read_secret
from cluster.types import Commit, ModelInfo, Request, RoutingTable
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.vllm_plugin.lengths import MeasuredLengths
from engine.colocated import ColocatedDrafters
from engine.drafter_sessions import DrafterSessions
from engine.gateway_sessions import GatewaySessions
from engine.inbox import TargetInbox
from engine.mailbox import DialingMailbox
from engine.sequences import LiveSequence, Sequences
from engine.telemetry import Telemetry
from router.drafting.frontiers import Frontiers, in_chunks
from router.drafting.length import PassFeedback
from router.drafting.length_rule import Outrider
from router.drafting.overlap_gains import Pipeline
from router.drafting.value import DecodeRate, DraftingValue, row_price
from router.drafting.wait import batch_held_until
from router.plan import SequenceView, Span, StepPlan
from router.planning.planner import PlannerSettings

# The environment: grpc://HOST:PORT of a drafter elsewhere, with `?token_file=FILE` and the files of `cluster.tls`.
URL_SETTING = "OUTRIDER_DRAFTER_URL"
_MAX_HOLD_S = PlannerSettings().max_hold_s


def dialled(url: str, target: ModelInfo) -> DialingMailbox:
    """The mailbox of a link to ``grpc://HOST:PORT?token_file=FILE&cert_file=FILE&key_file=FILE&ca_file=FILE``, kept up while
    it is drained. Raises InvalidField."""
    address, _, query = url.partition("?")
    if not address.startswith(("grpc://", "unix://")):
        raise InvalidField(URL_SETTING, url, "must be grpc://HOST:PORT or unix:///PATH")
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        token_file = fields.pop("token_file", None)
        files = TlsConfig.model_validate_strings(fields) if fields else None
    except ValueError as error:
        raise InvalidField(
            URL_SETTING, url, f"its fields must be token_file, or all of {', '.join(TlsConfig.model_fields)}"
        ) from error
    token = "" if token_file is None else read_secret(Path(token_file))
    if files is not None:
        from cluster.transport.tls import check  # imports gRPC

        check(files)
    hello = Hello(Role.TARGET, target.name, target.vocab_size, target.tokenizer_fingerprint, token, instance=token_hex(8))
    return DialingMailbox(hello, (address,), files)


class DraftersElsewhere:
    """A ``Drafter`` of the better of two drafts: of the lookups ``local``, and of a drafter that is linked to ``mailbox``,
    for which this process is a target (`engine.drafter_sessions`). Where that is gone, or its drafts come too late or do
    not pay, those of the lookups are left.

    Args:
        lengths: measures the passes, and knows how many draft tokens the last one verified.
        max_draft_len: of a request.
        clock: in seconds.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        local: Drafter,
        mailbox: Mailbox,
        target: ModelInfo,
        lengths: MeasuredLengths,
        max_draft_len: int,
        clock: Callable[[], float],
    ) -> None:
        mailbox.clock = clock
        self.telemetry = Telemetry()
        self._local, self._mailbox, self._lengths, self._clock = local, mailbox, lengths, clock
        self._max_draft_len = max_draft_len
        self._sequences = Sequences(target)
        none = ColocatedDrafters((), lengths.times.table())
        self._drafters = DrafterSessions(self._sequences, self.telemetry, RoutingTable(version=0), none)
        # A link has one target, and the drafter is the other end: there is no gateway.
        gateways = GatewaySessions(self._sequences, lambda request_id: None)
        self._inbox = TargetInbox(mailbox, target.vocab_size, gateways, self._drafters, lambda *submitted: None)
        self._rule, self._frontiers, self._rate = Outrider(), Frontiers(), DecodeRate()
        self._published: list[tuple[LiveSequence, Commit]] = []  # to be
        self._chosen: set[str] = set()  # requests whose last draft is not of the lookups
        self._began_s = clock()  # when the last pass began
        self._read(after_pass=False)  # dials

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self._local.open(request_id, token_ids, prompt_len, sampling, salt)
        prompt, output = tuple(token_ids[:prompt_len]), tuple(token_ids[prompt_len:])
        sampling = replace(sampling, max_tokens=self._sequences.model.max_model_len - prompt_len)
        request = Request(request_id, prompt, sampling, self._clock(), output_token_ids=output, cache_salt=salt)
        sequence = self._sequences.add(request)
        sequence.admit(len(token_ids) - 1, request.arrival_s)
        self._drafters.assign(sequence)
        self._published.append((sequence, Commit(request_id, prompt_len, output)))
        self._rate.interrupt()

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._local.extend(request_id, token_ids)
        num_drafts = self._lengths.verified.get(request_id, 0) if request_id in self._chosen else 0
        span = Span(request_id, 1, num_drafts, chosen=tuple(token_ids), num_accepted=min(num_drafts, len(token_ids) - 1))
        sequence = self._sequences.commit(span, self._clock())
        assert sequence is not None, "tokens were committed"
        self._published.append((sequence, sequence.committed()))

    def release(self, request_id: str) -> None:
        self._local.release(request_id)
        sequence = self._sequences.remove(request_id)
        if sequence is not None:
            self._drafters.release(sequence)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        now_s = self._clock()
        self._read(after_pass=True)
        decoding = [self._sequences[demand.request_id] for demand in demands]
        views = [sequence.view() for sequence in decoding]
        value = self._price(views, now_s)
        self._drafters.publish([sequence for sequence, _ in self._published], now_s)
        self._drafters.flush()
        drafts = self._local.propose(demands)  # while the other drafter drafts
        self._learn(now_s)
        expected = {draft.request_id: sum(accumulate(draft.confidences, mul)) for draft in drafts}
        self._await(decoding, expected, value)
        self._chosen.clear()
        found = [self._better(*one, expected) for one in zip(demands, drafts, strict=True)]
        self._began_s = self._clock()
        return found

    def check_integrity(self) -> None:
        self._local.check_integrity()
        assert all(sequence.running for sequence in self._sequences), "a request is followed that has no row"

    def close(self) -> None:
        """Closes the link."""
        for name, _ in self._drafters.num_followed():
            self._drafters.disconnect(name, "the server ends")

    def _read(self, after_pass: bool) -> None:
        """Takes mail. A drafter of another name than the last one's follows all requests from now on."""
        self._inbox.read(self._clock(), after_pass)
        chain = tuple([name for name, _ in self._drafters.num_followed()][-1:])
        former = self._drafters.table
        if chain and chain != former.defaults[0]:
            self._rule = Outrider({chain[0]: self._max_draft_len})
            chains = {sequence.request.id: chain for sequence in self._sequences}
            self._drafters.follow(RoutingTable(former.version + 1, chains, (chain,)))

    def _price(self, views: Sequence[SequenceView], now_s: float) -> DraftingValue:
        """Sets the budgets of the drafts that answer these commits. Returns what they are worth."""
        num, cost = max(1, len(views)), self._lengths.times.table()
        num_tokens = sum([len(commit.token_ids) for _, commit in self._published])
        self._rate.note(self._began_s, num_tokens, 0.0, len(views), cost.at(num))
        over_plain = self._rate.over_plain
        tokens_per_s = num / cost.at(num) * (1.0 if over_plain is None else over_plain)
        num_rows = num + sum(self._lengths.verified.values())
        drafters = self._drafters.views()
        value = DraftingValue(cost, drafters, row_price(tokens_per_s, num_rows, 0, cost), tokens_per_s)
        frontiers = self._frontiers.choose(Pipeline(views, drafters, cost))
        self._drafters.set_budgets(in_chunks(self._rule.budgets(views, value), frontiers, views))
        return value

    def _learn(self, now_s: float) -> None:
        """From the verdicts on the last drafts."""
        published, self._published = self._published, []
        judgements, pass_s = self._drafters.learn(published, now_s), now_s - self._began_s
        self._rule.learn(PassFeedback([commit for _, commit in published], judgements, pass_s, pass_s))
        self.telemetry.take_observations()  # no router reads them

    def _await(self, decoding: Sequence[LiveSequence], expected: Mapping[str, float], value: DraftingValue) -> None:
        """Waits for proposals, while they are expected to bring more than ``expected`` tokens and the wait costs."""
        while True:
            self._read(after_pass=False)
            now_s = self._clock()
            views = [sequence.view() for sequence in decoding]
            value = replace(value, drafters=self._drafters.views())
            held = batch_held_until(views, value, expected, _MAX_HOLD_S)
            until_s = max(held.values(), default=now_s)
            if until_s <= now_s:
                break
            self._drafters.note_plan(StepPlan((), held=held), now_s)
            self._mailbox.wait(until_s - now_s)
        self._drafters.note_plan(StepPlan(tuple([Span(view.request_id, 1) for view in views])), now_s)

    def _better(self, demand: Demand, draft: Draft, expected: Mapping[str, float]) -> Draft:
        state = self._sequences[draft.request_id].draft
        proposal = state.proposal
        if proposal is None:
            return draft
        survival = state.survival or tuple(accumulate(proposal.confidences, mul))
        if sum(survival) <= expected[draft.request_id]:
            return draft
        self._chosen.add(draft.request_id)
        confidences = [after / max(before, 1e-9) for before, after in pairwise((1.0, *survival))]
        return Draft(draft.request_id, proposal.token_ids[: demand.num_tokens], tuple(confidences[: demand.num_tokens]))
