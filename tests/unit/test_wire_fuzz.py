"""Bytes of any peer: the codec raises WireError or nothing, and the checks pass or name what is wrong with what it decodes.

Seeds are sound messages of every kind that together set every field of wire.proto. They are damaged as bytes (flips, cuts,
repeats, lengths of a varint's range, parts of other messages) and as values (every field at its extremes)."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message as WireMessage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import WireError
from cluster.message_checks import Inspection, request_fault
from cluster.messages import (
    Budget,
    CommitRound,
    DraftRound,
    DraftScore,
    DraftTiming,
    Extend,
    Hello,
    LevelReport,
    Open,
    OutcomeReport,
    ProposalRound,
    Role,
    SubmitRound,
    Verified,
)
from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from cluster.transport import wire_pb2 as wire
from cluster.transport.base import Limits, Mailbox
from cluster.transport.codec import MAX_PARTS, Frame, Greeting, Ping, Refusal, Welcome, decode, encode
from cluster.transport.rpc import _frames
from cluster.transport.stream import MAX_HANDSHAKE_BYTES, StreamLink
from cluster.types import Adapter, Commit, DraftTerms, FinishReason, Prefill, Proposal, Request, Slo, TokenLogprobs
from tests.support.drafter_bench import FakeLink

VOCAB_SIZE = 100
MESSAGES = (DraftRound, ProposalRound, SubmitRound, CommitRound)
SAMPLING = SamplingParams(
    max_tokens=9,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias=((3, 1.0), (4, -1.0)),
    stop=("end", "stop"),
    stop_token_ids=(7, 8),
    min_tokens=2,
    ignore_eos=True,
    seed=11,
    top_logprobs=2,
    allowed_token_ids=(1, 2, 3),
    prompt_logprobs=1,
    bad_words=((1,), (2, 3)),
    grammar=Grammar(GrammarKind.REGEX, "[a-z]+"),
)
LOGPROBS = (TokenLogprobs(-0.5, ((1, -0.5), (2, -1.0)), 1), TokenLogprobs(-2.0, ((3, -0.25),), 4))
SEEDS: tuple[Frame, ...] = (
    Greeting(
        Hello(Role.DRAFTER, "ngram", VOCAB_SIZE, "f" * 64, instance="i" * 16, tensors="memory://t"), b"n" * 32, b"p" * 32
    ),
    Welcome(b"p" * 32),
    Refusal("another tokenizer", tokenizer=True),
    Ping(),
    DraftRound(
        5,
        (Open("request-1", (1, 2, 3, 4), 3, SAMPLING, ("ngram", "small"), "salt", "trace"),),
        (Extend("request-2", 8, (5, 6)),),
        (Budget("request-2", DraftTerms(4, 0.25, 0.1, 0.3, 0.6, 2)),),
        ("request-3",),
    ),
    ProposalRound(
        5,
        (Proposal("request-1", 4, (5, 6), (0.75, 0.5), "ngram", unfinished=True),),
        (DraftScore("request-1", 4, 1, 2),),
        ("request-2",),
        (LevelReport("small", 3, 9, 0.1, 1, (Verified("ngram", (4, 3), (3, 1), 8, 6, 2, 1.5),)),),
        (DraftTiming(2, 0.01, 0.002),),
        (OutcomeReport(5, 2, 1, 8),),
    ),
    SubmitRound(
        (
            Request(
                *("request-1", (1, 2), SAMPLING, 3.0, Slo(0.5, 0.05, "chat"), ("ngram",), (4,), "salt", True, "trace", (5,)),
                adapter=Adapter("sql", "/sql", "key"),
            ),
        ),
        ("request-2",),
    ),
    CommitRound(
        (
            Commit("request-1", 4, (5, 6), 3, 1, "ngram", LOGPROBS, prompt_logprobs=LOGPROBS, prefill=Prefill(2, 0.1, 0.2)),
            Commit("request-2", 4, (), finish=FinishReason.ERROR, error="the target failed"),
        )
    ),
)
ENCODED = tuple(map(encode, SEEDS))
# Lengths and tags as varints: 0, 2^31 - 1, 2^32 - 1, 2^64 - 1, one without an end.
VARINTS = (b"\0", b"\xff\xff\xff\xff\7", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\1", b"\xff" * 12)
FLOATS = (0.0, -0.0, -1.0, 1.0, 1e300, 1e-300, math.nan, math.inf, -math.inf)
INTS = (0, 1, 2, 7, VOCAB_SIZE, 2**16, 2**31 - 1, 2**31, 2**32 - 1)

positions = st.floats(0, 1, exclude_max=True)
seeds = st.sampled_from(ENCODED)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A seed after a few edits of its bytes."""
    data = draw(seeds)
    for _ in range(draw(st.integers(1, 4))):
        start, end = sorted(int(draw(positions) * (len(data) + 1)) for _ in range(2))
        match draw(st.sampled_from(("flip", "cut", "drop", "repeat", "varint", "splice", "append"))):
            case "flip" if start < len(data):
                data = data[:start] + bytes([data[start] ^ draw(st.integers(1, 255))]) + data[start + 1 :]
            case "cut":
                data = data[:start]
            case "drop":
                data = data[:start] + data[end:]
            case "repeat":
                data = data[:end] + data[start:end] * draw(st.integers(1, 20)) + data[end:]
            case "varint":
                data = data[:start] + draw(st.sampled_from(VARINTS)) + data[start + draw(st.integers(0, 2)) :]
            case "splice":
                data = data[:start] + draw(seeds)[start:]
            case _:
                data += draw(seeds)  # protobuf merges them
    return data


@st.composite
def distorted(draw: st.DrawFn) -> bytes:
    """A seed whose bytes are a valid frame, with some fields cleared, repeated or at an extreme."""
    frame = wire.Frame.FromString(draw(seeds))
    for _ in range(draw(st.integers(1, 4))):
        parts = list(_parts_of(frame))
        _distort(draw(st.sampled_from(parts)), draw)
    return frame.SerializeToString()


def _parts_of(message: WireMessage) -> Iterator[WireMessage]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                yield from _parts_of(part)


def _distort(message: WireMessage, draw: st.DrawFn) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    how = draw(st.sampled_from(("clear", "double", "extreme", "extreme")))
    if how == "clear":
        message.ClearField(field.name)
    elif how == "double" and field.is_repeated:
        own = getattr(message, field.name)
        own.MergeFrom(list(own))
    elif field.message_type is not None:
        part = getattr(message, field.name)
        if field.is_repeated:
            part.add()
        else:
            part.SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).append(draw(_extremes(field)))
    else:
        setattr(message, field.name, draw(_extremes(field)))


def _extremes(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=64)
        case FieldDescriptor.CPPTYPE_STRING:
            return st.sampled_from(("", "\0", "x" * 300, "ngram", "request-1", "{", "json_schema"))
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.sampled_from(FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.sampled_from((0, 3, 4, 99))
        case FieldDescriptor.CPPTYPE_UINT64:
            return st.sampled_from((*INTS, 2**64 - 1))
        case _:
            return st.sampled_from(INTS)


def _judge(data: bytes) -> Frame | None:
    """Decodes and checks as the loops do: None where the codec or a check refuses. Fails on any other exception."""
    try:
        frame = decode(data)
    except WireError:
        return None
    assert isinstance(frame, Frame)
    if not isinstance(frame, MESSAGES):
        return frame
    inspection = Inspection("fuzz")
    link = FakeLink()
    sound = inspection.sound_part(link, frame, VOCAB_SIZE)
    assert inspection.num_unsound == (sound is not frame)
    assert inspection.sound_part(link, sound, VOCAB_SIZE) is sound  # nothing invalid is left
    assert encode(sound)  # and the wire holds it
    faults = [request_fault(request, VOCAB_SIZE) for request in sound.submits] if isinstance(sound, SubmitRound) else []
    return frame if sound is frame and not any(faults) else None


def test_seeds_are_sound_and_set_every_field_of_every_frame() -> None:
    assert [_judge(data) for data in ENCODED] == list(SEEDS)
    unset = _field_names(wire.Frame.DESCRIPTOR)
    for data in ENCODED:
        for part in _parts_of(wire.Frame.FromString(data)):
            unset -= {field.full_name for field, _ in part.ListFields()}
    assert not unset


def _field_names(descriptor: Descriptor) -> set[str]:
    names = {field.full_name for field in descriptor.fields}
    return names.union(*(_field_names(field.message_type) for field in descriptor.fields if field.message_type is not None))


@given(damaged() | st.binary(max_size=400))
@settings(max_examples=15 * settings.default.max_examples, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_bytes_are_refused_or_checked(data: bytes) -> None:
    _judge(data)


@given(distorted())
@settings(max_examples=15 * settings.default.max_examples, suppress_health_check=[HealthCheck.too_slow])
def test_valid_frames_of_any_values_are_refused_or_checked(data: bytes) -> None:
    _judge(data)


class _Pipe:
    """Takes frames until it is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def write(self, frame: bytes) -> None:
        assert not self.is_closed

    def resume(self) -> None: ...

    def finish(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True


@given(st.lists(damaged() | distorted() | seeds, min_size=1, max_size=5), st.booleans())
@settings(max_examples=4 * settings.default.max_examples, suppress_health_check=[HealthCheck.too_slow])
def test_no_frame_of_a_peer_without_the_secret_raises_or_links(frames: list[bytes], accepts: bool) -> None:
    pipe, mailbox = _Pipe(), Mailbox()
    link = StreamLink(pipe, Hello(Role.TARGET, "t", VOCAB_SIZE, "f" * 64, "secret"), mailbox, Limits(), "unix:///x", accepts)
    for frame in frames:
        assert link.on_frame(frame)
        assert pipe.is_closed or len(frame) <= MAX_HANDSHAKE_BYTES
    assert not link.is_up
    assert not mailbox.drain()


@given(st.lists(st.binary(max_size=200) | damaged().map(lambda data: b"\0" + data), max_size=30))
def test_pieces_of_grpc_frames_never_exceed_the_limit(pieces: list[bytes]) -> None:
    with suppress(WireError):
        assert all(len(frame) <= 1000 for frame in _frames(pieces, lambda: 1000))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("draft_round", wire.DraftRound(extends=[wire.Extend()])),
        ("draft_round", wire.DraftRound(releases=[""])),
        ("proposal_round", wire.ProposalRound(levels=[wire.LevelReport(verified=[wire.Verified()])])),
        ("submit_round", wire.SubmitRound(aborts=[""])),
        ("commit_round", wire.CommitRound(commits=[wire.Commit()])),
    ],
)
def test_a_frame_of_too_many_parts_is_refused_before_any_is_decoded(kind: str, parts: WireMessage) -> None:
    """An empty part takes two bytes on the wire and more than a hundred as Python objects."""
    part = parts.SerializeToString()
    most = wire.Frame.FromString(wire.Frame(**{kind: {}}).SerializeToString())
    num_parts = 2 if parts.DESCRIPTOR.name == "ProposalRound" else 1  # a report and what it verified
    getattr(most, kind).MergeFromString(part * (MAX_PARTS // num_parts))
    assert isinstance(decode(most.SerializeToString()), MESSAGES)
    getattr(most, kind).MergeFromString(part)
    with pytest.raises(WireError, match=f"at most {MAX_PARTS}"):
        decode(most.SerializeToString())


def test_the_limit_counts_every_list_of_messages() -> None:
    """Those of a frame, and the only one within another. Numbers and texts are bounded by the bytes of a frame."""

    def nested(message: Descriptor, is_listed: bool) -> Iterator[str]:
        for field in message.fields:
            if field.message_type is not None:
                if is_listed and field.is_repeated:
                    yield f"{message.name}.{field.name}"
                yield from nested(field.message_type, is_listed or field.is_repeated)

    assert set(nested(wire.Frame.DESCRIPTOR, is_listed=False)) == {"LevelReport.verified"}
