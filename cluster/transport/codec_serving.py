"""Encodes the messages between gateways and targets."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from cluster.errors import WireError
from cluster.messages import CommitRound, SubmitRound
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec_sampling import decode_sampling, encode_sampling
from cluster.types import Commit, FinishReason, Prefill, Request, Slo, TokenLogprobs

_FINISH_TO_WIRE: dict[FinishReason | None, Any] = {  # Any: the generated types take the numbers for ints here
    None: wire.NOT_FINISHED,
    **{reason: wire.FinishReason.Value(reason.name) for reason in FinishReason},
}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}


def encode_submit_round(message: SubmitRound, out: wire.Frame) -> None:
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
        encode_sampling(request.sampling, submit.sampling)
        if request.chain is not None:
            submit.chain.SetInParent()
            submit.chain.drafters.extend(request.chain)
    to.aborts.extend(message.aborts)


def decode_submit_round(message: wire.SubmitRound) -> SubmitRound:
    return SubmitRound(
        submits=tuple([_decode_request(submit) for submit in message.submits]),
        aborts=tuple(message.aborts),
    )


def _decode_request(submit: wire.Request) -> Request:
    return Request(
        id=submit.id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=decode_sampling(submit.sampling),
        arrival_s=submit.arrival_s,
        slo=Slo(
            ttft_s=submit.ttft_s if submit.HasField("ttft_s") else None,
            tpot_s=submit.tpot_s if submit.HasField("tpot_s") else None,
        ),
        chain=tuple(submit.chain.drafters) if submit.HasField("chain") else None,
    )


def encode_commit_round(message: CommitRound, out: wire.Frame) -> None:
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
        if commit.prefill is not None:
            added.prefill.num_cached_tokens = commit.prefill.num_cached_tokens
            added.prefill.queue_s = commit.prefill.queue_s
            added.prefill.prefill_s = commit.prefill.prefill_s


def decode_commit_round(message: wire.CommitRound) -> CommitRound:
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
                    _decode_prefill(commit.prefill) if commit.HasField("prefill") else None,
                )
                for commit in message.commits
            ]
        )
    )


def _decode_prefill(prefill: wire.Prefill) -> Prefill:
    return Prefill(prefill.num_cached_tokens, prefill.queue_s, prefill.prefill_s)


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
