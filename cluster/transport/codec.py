"""Frames to bytes and back: the dataclasses of ``cluster.messages`` as the protobuf of ``wire.proto``.

One message carries a whole round, so the work here is per request and never per token: token ids and confidences cross as
packed columns, converted by the protobuf runtime.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from google.protobuf.message import DecodeError, EncodeError

from cluster.errors import InvalidField, WireError
from cluster.messages import (
    Budget,
    CommitRound,
    DraftRound,
    Extend,
    Hello,
    LevelReport,
    Message,
    Open,
    ProposalRound,
    Role,
    Score,
    SubmitRound,
    Verified,
)
from cluster.transport import wire_pb2 as wire
from cluster.transport.frames import Frame, Ping, Refusal, Welcome
from cluster.types import Commit, FinishReason, Proposal, Request, SamplingParams, Slo, TokenLogprobs

_FINISH_TO_WIRE: dict[FinishReason | None, Any] = {  # Any: the generated types take the numbers for ints here
    None: wire.NOT_FINISHED,
    **{reason: wire.FinishReason.Value(reason.name) for reason in FinishReason},
}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}


def encode(frame: Frame) -> bytes:
    """The bytes of a frame.

    Raises:
        WireError: a value lies outside what the wire can hold (a negative token id, for instance).
    """
    out = wire.Frame()
    try:
        _ENCODERS[type(frame)](frame, out)
        return out.SerializeToString()
    except (ValueError, TypeError, EncodeError) as error:
        raise WireError(f"a {type(frame).__name__} cannot be sent: {error}") from error


def decode(data: bytes, max_bytes: int | None = None) -> Frame:
    """The frame that ``data`` holds.

    Raises:
        WireError: these bytes are not a frame, or more than ``max_bytes``.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise WireError(f"a frame of {len(data)} bytes came, at most {max_bytes} are allowed")
    try:
        frame = wire.Frame.FromString(data)
        kind = frame.WhichOneof("kind")
        if kind is None:
            raise WireError(f"{len(data)} bytes came that hold no frame of this protocol version")
        return _DECODERS[kind](getattr(frame, kind))
    except (DecodeError, InvalidField, ValueError, KeyError) as error:
        raise WireError(f"{len(data)} bytes came that are not a frame: {error}") from error


def encode_message(message: Message, max_bytes: int) -> bytes:
    """As ``encode``, for a link that takes at most ``max_bytes``."""
    data = encode(message)
    if len(data) > max_bytes:
        raise WireError(
            f"a {type(message).__name__} of {len(data)} bytes cannot be sent: the link takes at most {max_bytes}"
        )
    return data


def decode_message(data: bytes) -> Message:
    """As ``decode``, of a frame that can only be a message."""
    frame = decode(data)
    if not isinstance(frame, Message):
        raise WireError(f"a {type(frame).__name__} came where a message was due")
    return frame


# The handshake and the heartbeat.


def _encode_hello(hello: Hello, out: wire.Frame) -> None:
    to = out.hello
    to.role = hello.role.value
    to.name = hello.name
    to.vocab_size = hello.vocab_size
    to.tokenizer_fingerprint = hello.tokenizer_fingerprint
    to.token = hello.token
    to.protocol_version = hello.protocol_version


def _decode_hello(hello: wire.Hello) -> Hello:
    return Hello(
        role=Role(hello.role),
        name=hello.name,
        vocab_size=hello.vocab_size,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        token=hello.token,
        protocol_version=hello.protocol_version,
    )


def _encode_welcome(_: Welcome, out: wire.Frame) -> None:
    out.welcome.SetInParent()


def _encode_refusal(refusal: Refusal, out: wire.Frame) -> None:
    out.refusal.SetInParent()
    out.refusal.reason = refusal.reason
    out.refusal.tokenizer = refusal.tokenizer


def _encode_ping(_: Ping, out: wire.Frame) -> None:
    out.ping.SetInParent()


# Parts of several messages.


def _encode_sampling(sampling: SamplingParams, to: wire.SamplingParams) -> None:
    to.max_tokens = sampling.max_tokens
    to.temperature = sampling.temperature
    if sampling.top_k is not None:
        to.top_k = sampling.top_k
    to.top_p = sampling.top_p
    to.min_p = sampling.min_p
    to.repetition_penalty = sampling.repetition_penalty
    to.presence_penalty = sampling.presence_penalty
    to.frequency_penalty = sampling.frequency_penalty
    if sampling.logit_bias:
        token_ids, values = zip(*sampling.logit_bias, strict=True)
        to.logit_bias_token_ids.extend(token_ids)
        to.logit_bias_values.extend(values)
    to.stop.extend(sampling.stop)
    to.stop_token_ids.extend(sampling.stop_token_ids)
    to.min_tokens = sampling.min_tokens
    to.ignore_eos = sampling.ignore_eos
    to.seed = sampling.seed
    if sampling.top_logprobs is not None:
        to.top_logprobs = sampling.top_logprobs


def _decode_sampling(sampling: wire.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
    )


def _encode_logprobs(logprobs: tuple[TokenLogprobs, ...], to: wire.Logprobs) -> None:
    to.chosen.extend([token.logprob for token in logprobs])
    to.num_top.extend([len(token.top) for token in logprobs])
    pairs = list(chain.from_iterable(token.top for token in logprobs))
    if pairs:
        token_ids, values = zip(*pairs, strict=True)
        to.top_token_ids.extend(token_ids)
        to.top_logprobs.extend(values)


def _decode_logprobs(logprobs: wire.Logprobs) -> tuple[TokenLogprobs, ...]:
    if sum(logprobs.num_top) != len(logprobs.top_token_ids):
        raise WireError("the columns of a commit's log-probabilities differ in length")
    pairs: Iterator[tuple[int, float]] = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return tuple(
        TokenLogprobs(chosen, tuple(islice(pairs, num_top)))
        for chosen, num_top in zip(logprobs.chosen, logprobs.num_top, strict=True)
    )


# Target to drafter, and back.


def _encode_draft_round(message: DraftRound, out: wire.Frame) -> None:
    to = out.draft_round
    to.SetInParent()
    to.table_version = message.table_version
    for opened in message.opens:
        request = to.opens.add(request_id=opened.request_id, prompt_len=opened.prompt_len, token_ids=opened.token_ids)
        request.proposers.extend(opened.proposers)
        _encode_sampling(opened.sampling, request.sampling)
    add = to.extends.add
    for extend in message.extends:
        add(request_id=extend.request_id, base_len=extend.base_len, token_ids=extend.token_ids)
    for budget in message.budgets:
        to.budgets.add(request_id=budget.request_id, num_tokens=budget.num_tokens)
    to.releases.extend(message.releases)


def _decode_draft_round(message: wire.DraftRound) -> DraftRound:
    return DraftRound(
        table_version=message.table_version,
        opens=tuple(
            [
                Open(
                    opened.request_id,
                    tuple(opened.token_ids),
                    opened.prompt_len,
                    _decode_sampling(opened.sampling),
                    tuple(opened.proposers),
                )
                for opened in message.opens
            ]
        ),
        extends=tuple([Extend(extend.request_id, extend.base_len, tuple(extend.token_ids)) for extend in message.extends]),
        budgets=tuple([Budget(budget.request_id, budget.num_tokens) for budget in message.budgets]),
        releases=tuple(message.releases),
    )


def _encode_proposal_round(message: ProposalRound, out: wire.Frame) -> None:
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
        )
    for score in message.scores:
        to.scores.add(
            request_id=score.request_id,
            base_len=score.base_len,
            num_matched=score.num_matched,
            num_scored=score.num_scored,
        )
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
            report.verified.add(proposer=verified.proposer, num_reached=verified.num_reached, num_right=verified.num_right)


def _decode_proposal_round(message: wire.ProposalRound) -> ProposalRound:
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
                )
                for proposal in message.proposals
            ]
        ),
        scores=tuple(
            [Score(score.request_id, score.base_len, score.num_matched, score.num_scored) for score in message.scores]
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
                Verified(verified.proposer, tuple(verified.num_reached), tuple(verified.num_right))
                for verified in level.verified
            ]
        ),
    )


# Gateway to target, and back.


def _encode_submit_round(message: SubmitRound, out: wire.Frame) -> None:
    to = out.submit_round
    to.SetInParent()
    for request in message.submits:
        submit = to.submits.add(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            arrival_s=request.arrival_s,
            ttft_s=request.slo.ttft_s,
            tpot_s=request.slo.tpot_s,
        )
        _encode_sampling(request.sampling, submit.sampling)
        if request.chain is not None:
            submit.chain.SetInParent()
            submit.chain.drafters.extend(request.chain)
    to.aborts.extend(message.aborts)


def _decode_submit_round(message: wire.SubmitRound) -> SubmitRound:
    return SubmitRound(
        submits=tuple([_decode_request(submit) for submit in message.submits]),
        aborts=tuple(message.aborts),
    )


def _decode_request(submit: wire.Request) -> Request:
    return Request(
        id=submit.id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=_decode_sampling(submit.sampling),
        arrival_s=submit.arrival_s,
        slo=Slo(
            ttft_s=submit.ttft_s if submit.HasField("ttft_s") else None,
            tpot_s=submit.tpot_s if submit.HasField("tpot_s") else None,
        ),
        chain=tuple(submit.chain.drafters) if submit.HasField("chain") else None,
    )


def _encode_commit_round(message: CommitRound, out: wire.Frame) -> None:
    to = out.commit_round
    to.SetInParent()
    add = to.commits.add
    for commit in message.commits:
        added = add(
            request_id=commit.request_id,
            base_len=commit.base_len,
            token_ids=commit.token_ids,
            num_proposed=commit.num_proposed,
            num_accepted=commit.num_accepted,
            drafter=commit.drafter,
            finish=_FINISH_TO_WIRE[commit.finish],
            error=commit.error,
        )
        if commit.logprobs:
            _encode_logprobs(commit.logprobs, added.logprobs)


def _decode_commit_round(message: wire.CommitRound) -> CommitRound:
    return CommitRound(
        tuple(
            [
                Commit(
                    commit.request_id,
                    commit.base_len,
                    tuple(commit.token_ids),
                    commit.num_proposed,
                    commit.num_accepted,
                    commit.drafter if commit.HasField("drafter") else None,
                    _decode_logprobs(commit.logprobs) if commit.HasField("logprobs") else (),
                    _FINISH_FROM_WIRE[commit.finish],
                    commit.error if commit.HasField("error") else None,
                )
                for commit in message.commits
            ]
        )
    )


_ENCODERS: dict[type, Callable[[Any, wire.Frame], None]] = {
    Hello: _encode_hello,
    Welcome: _encode_welcome,
    Refusal: _encode_refusal,
    Ping: _encode_ping,
    DraftRound: _encode_draft_round,
    ProposalRound: _encode_proposal_round,
    SubmitRound: _encode_submit_round,
    CommitRound: _encode_commit_round,
}

_DECODERS: dict[str, Callable[[Any], Frame]] = {
    "hello": _decode_hello,
    "welcome": lambda _: Welcome(),
    "refusal": lambda refusal: Refusal(refusal.reason, refusal.tokenizer),
    "ping": lambda _: Ping(),
    "draft_round": _decode_draft_round,
    "proposal_round": _decode_proposal_round,
    "submit_round": _decode_submit_round,
    "commit_round": _decode_commit_round,
}
