"""Encodes the messages between targets and drafters."""

from dataclasses import fields
from typing import Any

from cluster.messages import Budget, DraftRound, DraftScore, Extend, LevelReport, Open, ProposalRound, Verified
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec_sampling import decode_sampling, encode_sampling
from cluster.types import Proposal


def encode_draft_round(message: DraftRound, out: wire.Frame) -> None:
    to = out.draft_round
    to.SetInParent()
    to.table_version = message.table_version
    for opened in message.opens:
        request = to.opens.add(request_id=opened.request_id, prompt_len=opened.prompt_len, token_ids=opened.token_ids)
        request.proposers.extend(opened.proposers)
        encode_sampling(opened.sampling, request.sampling)
    add = to.extends.add
    for extend in message.extends:
        add(request_id=extend.request_id, base_len=extend.base_len, token_ids=extend.token_ids)
    for budget in message.budgets:
        to.budgets.add(**_fields(budget))
    to.releases.extend(message.releases)


def decode_draft_round(message: wire.DraftRound) -> DraftRound:
    return DraftRound(
        table_version=message.table_version,
        opens=tuple(
            [
                Open(
                    opened.request_id,
                    tuple(opened.token_ids),
                    opened.prompt_len,
                    decode_sampling(opened.sampling),
                    tuple(opened.proposers),
                )
                for opened in message.opens
            ]
        ),
        extends=tuple([Extend(extend.request_id, extend.base_len, tuple(extend.token_ids)) for extend in message.extends]),
        budgets=tuple([Budget(budget.request_id, budget.num_tokens, budget.row_price) for budget in message.budgets]),
        releases=tuple(message.releases),
    )


def _fields(message: Budget | DraftScore | Verified) -> dict[str, Any]:
    """The dataclasses name their fields as ``wire.proto`` does."""
    return {field.name: getattr(message, field.name) for field in fields(message)}


def encode_proposal_round(message: ProposalRound, out: wire.Frame) -> None:
    to = out.proposal_round
    to.SetInParent()
    to.table_version = message.table_version
    add = to.proposals.add
    for proposal in message.proposals:
        add(
            request_id=proposal.request_id,
            base_len=proposal.base_len,
            token_ids=proposal.token_ids,
            confidences=proposal.confidences,
            drafter=proposal.drafter,
            unfinished=proposal.unfinished,
        )
    for score in message.scores:
        to.scores.add(**_fields(score))
    to.resyncs.extend(message.resyncs)
    for level in message.levels:
        report = to.levels.add(
            drafter=level.drafter,
            num_passes=level.num_passes,
            num_rows=level.num_rows,
            busy_s=level.busy_s,
            num_lost=level.num_lost,
        )
        for verified in level.verified:
            report.verified.add(**_fields(verified))


def decode_proposal_round(message: wire.ProposalRound) -> ProposalRound:
    return ProposalRound(
        table_version=message.table_version,
        proposals=tuple(
            [
                Proposal(
                    proposal.request_id,
                    proposal.base_len,
                    tuple(proposal.token_ids),
                    tuple(proposal.confidences),
                    proposal.drafter,
                    proposal.unfinished,
                )
                for proposal in message.proposals
            ]
        ),
        scores=tuple(
            [DraftScore(score.request_id, score.base_len, score.num_matched, score.num_scored) for score in message.scores]
        ),
        resyncs=tuple(message.resyncs),
        levels=tuple([_decode_level(level) for level in message.levels]),
    )


def _decode_level(level: wire.LevelReport) -> LevelReport:
    return LevelReport(
        level.drafter,
        level.num_passes,
        level.num_rows,
        level.busy_s,
        level.num_lost,
        tuple(
            [
                Verified(one.proposer, tuple(one.num_reached), tuple(one.num_right), one.num_asked, one.num_proposed)
                for one in level.verified
            ]
        ),
    )
