"""Everything that travels arrives as it was sent; what is no frame raises one clear error."""

import re
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import WireError
from cluster.messages import (
    Budget,
    CommitRound,
    DraftRound,
    DraftScore,
    Extend,
    Hello,
    LevelReport,
    Open,
    ProposalRound,
    Role,
    SubmitRound,
    Verified,
)
from cluster.sampling_params import MAX_SEED, SamplingParams
from cluster.transport import wire_pb2 as wire
from cluster.transport.codec import Frame, Greeting, Ping, Refusal, Welcome, decode, encode, encode_message
from cluster.types import Commit, DraftTerms, FinishReason, Prefill, Proposal, Request, Slo, TokenLogprobs

ROOT = Path(__file__).parents[2]

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
uint32s = st.integers(0, 2**32 - 1)
token_ids = st.lists(uint32s, max_size=12).map(tuple)
floats = st.floats(width=32, allow_nan=False)
times = st.floats(allow_nan=False, allow_infinity=False)

# The bounds of SamplingParams: the values between them must arrive exactly, to the last bit.
samplings = st.integers(1, 2**31 - 1).flatmap(
    lambda max_tokens: st.builds(
        SamplingParams,
        max_tokens=st.just(max_tokens),
        temperature=st.floats(0, 2),
        top_k=st.none() | st.integers(1, 2**31 - 1),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0, 10, exclude_min=True),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.lists(st.tuples(uint32s, st.floats(-100, 100)), max_size=4).map(tuple),
        stop=st.lists(names.filter(bool), max_size=3).map(tuple),
        stop_token_ids=token_ids,
        min_tokens=st.integers(0, max_tokens),
        ignore_eos=st.booleans(),
        seed=st.integers(0, MAX_SEED),
        top_logprobs=st.none() | st.integers(0, 20),
        allowed_token_ids=token_ids,
        bad_words=st.lists(st.lists(uint32s, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
        prompt_logprobs=st.none() | st.integers(0, 20),
    )
)
tops = st.lists(st.tuples(uint32s, floats), max_size=4).map(tuple)
logprobs = st.lists(st.builds(TokenLogprobs, floats, tops), max_size=4).map(tuple)
ranked_logprobs = st.lists(st.builds(TokenLogprobs, floats, tops, uint32s), max_size=4).map(tuple)


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


hellos = st.builds(
    Hello, role=st.sampled_from(Role), name=names, vocab_size=uint32s, tokenizer_fingerprint=names, protocol_version=uint32s
)
greetings = st.builds(Greeting, hellos, st.binary(max_size=40), st.binary(max_size=40))
chances = st.floats(0, 1)
terms = st.builds(DraftTerms, uint32s, chances, chances, chances, st.none() | chances, uint32s)
draft_rounds = st.builds(
    DraftRound,
    st.integers(0, 2**64 - 1),
    some(st.builds(Open, names, token_ids, uint32s, samplings, some(names), names)),
    some(st.builds(Extend, names, uint32s, token_ids)),
    some(st.builds(Budget, names, terms)),
    some(names),
)
proposal_rounds = st.builds(
    ProposalRound,
    st.integers(0, 2**64 - 1),
    some(st.builds(Proposal, names, uint32s, token_ids, st.lists(floats, max_size=4).map(tuple), names, st.booleans())),
    some(st.builds(DraftScore, names, uint32s, uint32s, uint32s)),
    some(names),
    some(
        st.builds(
            LevelReport,
            names,
            uint32s,
            uint32s,
            times,
            uint32s,
            some(st.builds(Verified, names, token_ids, token_ids, uint32s, uint32s, uint32s, times)),
        )
    ),
)
requests = st.builds(
    Request,
    names,
    token_ids,
    samplings,
    times,
    st.builds(Slo, st.none() | times, st.none() | times, st.none() | names),
    st.none() | some(names),
    token_ids,
    names,
)
submit_rounds = st.builds(SubmitRound, some(requests), some(names))
commits = st.builds(
    Commit,
    names,
    uint32s,
    token_ids,
    uint32s,
    uint32s,
    st.none() | names,
    logprobs,
    st.none() | st.sampled_from(FinishReason),
    st.none() | names,
    st.none() | st.builds(Prefill, uint32s, times, times),
    ranked_logprobs,
)
commit_rounds = st.builds(CommitRound, some(commits))
refusals = st.builds(Refusal, names, st.booleans())
messages = draft_rounds | proposal_rounds | submit_rounds | commit_rounds
frames = greetings | refusals | st.builds(Welcome, st.binary(max_size=40)) | st.just(Ping()) | messages


@given(frames)
@settings(max_examples=5 * settings.default.max_examples)
def test_every_frame_arrives_as_it_was_sent(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(messages)
def test_what_was_optional_and_absent_stays_so_and_tuples_stay_tuples(message: Frame) -> None:
    assert repr(decode(encode(message))) == repr(message)  # unlike ==, repr tells 0 from False and () from []


def test_absent_is_not_zero_and_empty_is_not_absent() -> None:
    plain = SamplingParams(max_tokens=1, top_logprobs=None)
    asked = SamplingParams(max_tokens=1, top_logprobs=0)
    alone = Request("a", (1,), asked, 0.0, Slo(ttft_s=0.0), chain=())
    routed = Request("b", (1,), plain, 0.0, Slo(), chain=None)
    back = decode(encode(SubmitRound((alone, routed))))
    assert isinstance(back, SubmitRound)
    assert [request.chain for request in back.submits] == [(), None]
    assert [request.slo.ttft_s for request in back.submits] == [0.0, None]
    assert [request.sampling.top_logprobs for request in back.submits] == [0, None]
    commit = decode(encode(CommitRound((Commit("a", 1, (2,), drafter="", error=""), Commit("b", 1, (2,))))))
    assert isinstance(commit, CommitRound)
    assert [(c.drafter, c.error) for c in commit.commits] == [("", ""), (None, None)]


def test_confidences_are_rounded_to_floats() -> None:
    sent = ProposalRound(1, (Proposal("a", 1, (2,), (0.1,), "d"),))
    back = decode(encode(sent))
    assert isinstance(back, ProposalRound)
    assert back.proposals[0].confidences == (float(np.float32(0.1)),)


def test_numpy_numbers_arrive_as_plain_ones() -> None:
    back = decode(encode(DraftRound(1, extends=(Extend("a", 3, tuple(np.arange(4))),))))
    assert isinstance(back, DraftRound)
    assert back.extends[0].token_ids == (0, 1, 2, 3)
    assert {type(token) for token in back.extends[0].token_ids} == {int}


@pytest.mark.parametrize(
    "message",
    [
        DraftRound(1, extends=(Extend("a", 3, (-1,)),)),
        DraftRound(1, extends=(Extend("a", 3, (2**32,)),)),
        DraftRound(-1),
        DraftRound(1, releases=("\ud800",)),
        DraftRound(1, extends=(Extend("a", 3, (1.5,)),)),  # type: ignore[arg-type]
        ProposalRound(1, (Proposal("a", 3, (1,), ("high",), "d"),)),  # type: ignore[arg-type]
    ],
)
def test_what_the_wire_cannot_hold_is_refused(message: DraftRound | ProposalRound) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        encode(message)


@given(st.binary(max_size=200))
@settings(max_examples=5 * settings.default.max_examples)
def test_garbage_is_a_wire_error_or_a_frame(data: bytes) -> None:
    with suppress(WireError):
        assert isinstance(decode(data), Frame)


@given(messages, st.data())
def test_a_cut_or_flipped_message_is_a_wire_error_or_another_frame(message: Frame, data: st.DataObject) -> None:
    sent = encode(message)
    cut = sent[: data.draw(st.integers(0, len(sent) - 1))]
    flipped = bytearray(sent)
    flipped[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
    for damaged in (cut, bytes(flipped)):
        with suppress(WireError):
            assert isinstance(decode(damaged), Frame)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff" * 10,
        wire.Frame(hello=wire.Hello(role="spy")).SerializeToString(),
        wire.Frame(draft_round=wire.DraftRound(opens=[wire.Open(request_id="no sampling")])).SerializeToString(),
        wire.Frame(
            commit_round=wire.CommitRound(commits=[wire.Commit(logprobs=wire.Logprobs(chosen=[1.0], num_top=[3]))])
        ).SerializeToString(),
        wire.Frame(
            commit_round=wire.CommitRound(commits=[wire.Commit(logprobs=wire.Logprobs(chosen=[1.0, 2.0], num_top=[0]))])
        ).SerializeToString(),
        wire.Frame(
            commit_round=wire.CommitRound(
                commits=[wire.Commit(prompt_logprobs=wire.Logprobs(chosen=[1.0, 2.0], num_top=[0, 0], ranks=[1]))]
            )
        ).SerializeToString(),
        encode(DraftRound(1, releases=("x" * 100,)))[:-1],
        bytes([0x2A, 0x03, 0x2A, 0x01, 0xFF]),  # a release whose name is not UTF-8
    ],
)
def test_damaged_bytes_raise_a_wire_error(damaged: bytes) -> None:
    with pytest.raises(WireError):
        decode(damaged)


def test_too_many_bytes_are_refused_on_either_side() -> None:
    message = DraftRound(1, releases=("x" * 100,))
    size = len(encode(message))
    assert decode(encode_message(message, size), size) == message
    with pytest.raises(WireError, match=f"DraftRound of {size} bytes cannot be sent: the link takes at most {size - 1}"):
        encode_message(message, size - 1)
    with pytest.raises(WireError, match=f"of {size} bytes came, at most {size - 1}"):
        decode(encode(message), size - 1)


@pytest.mark.skipif(find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    """`make proto` regenerates it."""
    options = [f"--proto_path={ROOT}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    source = ROOT / "cluster/transport/wire.proto"
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, str(source)], check=True, timeout=60)
    for name in ("wire_pb2.py", "wire_pb2.pyi"):
        fresh = (tmp_path / "cluster/transport" / name).read_text()
        assert (ROOT / "cluster/transport" / name).read_text() == fresh


def test_no_token_ids_travel_unpacked() -> None:
    """Repeated numbers are packed: a thousand small token ids take a thousand bytes and little more."""
    assert len(encode(DraftRound(1, extends=(Extend("a", 3, (7,) * 1000),)))) < 1030
    assert not re.search(r"packed\s*=\s*false", (ROOT / "cluster/transport/wire.proto").read_text())
