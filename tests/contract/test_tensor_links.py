"""What every tensor link does: within a process, and over gloo and shared memory between two ends of this one."""

import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from cluster.errors import LinkClosed
from cluster.transport.tensors import MAX_QUEUED_FRAMES, Frame, FrameQueue, Part, TensorEnd, TensorLink, groups, header_of
from cluster.transport.tensors.groups import Meeting, TensorReceiver, TensorSender, call, shared
from cluster.transport.tensors.shared import SLOT_BYTES, SharedWire
from drafters.hidden_states.received import ReceivedStates
from tests.support.memory_tensors import MemoryTensors
from tests.support.waiting import eventually

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class End:
    """Collects what the receiving end is given; ``holds`` makes it hang."""

    def __init__(self) -> None:
        self.frames: queue.Queue[Frame] = queue.Queue()
        self.reasons: queue.Queue[str] = queue.Queue()
        self.holds = threading.Event()
        self.holds.set()

    def receive(self, frame: Frame) -> None:
        self.holds.wait(DEADLINE_S)
        self.frames.put(frame)

    @property
    def end(self) -> TensorEnd:
        return TensorEnd(self.receive, self.reasons.put)


Pair = tuple[Any, End]
KINDS = ("gloo", "shared")


def link_by(
    kind: str, end: End, meeting: Meeting | None = None, own: End | None = None
) -> tuple[TensorSender, TensorReceiver]:
    """``own``: of the sender."""
    meeting = meeting or Meeting("127.0.0.1", shares_memory=kind == "shared")
    with ThreadPoolExecutor(1) as executor:
        answered = executor.submit(meeting.answer, "drafter", CPU, None if own is None else own.end)
        receiver = call(meeting.address, "drafter", CPU, end.end)
        assert isinstance(receiver._wire, SharedWire) == (kind == "shared")
        return answered.result(), receiver


@pytest.fixture(params=["memory", *KINDS])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    end = End()
    link: TensorLink = MemoryTensors(end.end) if request.param == "memory" else link_by(request.param, end)[0]
    yield link, end
    end.holds.set()
    link.close()


def frame(number: int, num_rows: int = 3) -> Frame:
    rows = torch.full((num_rows, 4), float(number)) if num_rows else None
    return Frame((Part(f"r{number}", number, number + num_rows, number + num_rows),), (f"ended-{number}",), rows)


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    link, end = pair
    sent = [frame(i, i % 4) for i in range(40)]
    assert all(map(link.send, sent))
    for expected in sent:
        found = end.frames.get(timeout=DEADLINE_S)
        assert (found.parts, found.ended) == (expected.parts, expected.ended)
        assert (found.rows is None) == (expected.rows is None)
        assert expected.rows is None or torch.equal(found.rows, expected.rows)


def test_half_precision_arrives_as_it_is(pair: Pair) -> None:
    link, end = pair
    rows = torch.randn(5, 7).to(torch.bfloat16)
    link.send(Frame((Part("a", 0, 5, 5),), (), rows[:, ::2]))
    found = end.frames.get(timeout=DEADLINE_S).rows
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rows[:, ::2])


def test_the_other_end_is_told_when_a_link_closes(pair: Pair) -> None:
    link, end = pair
    link.send(frame(1))
    end.frames.get(timeout=DEADLINE_S)
    link.close()
    link.close()
    assert end.reasons.get(timeout=DEADLINE_S)
    assert not link.send(frame(2))


def test_a_queue_is_bounded_in_bytes_and_frames() -> None:
    frames = FrameQueue(max_bytes=100)
    assert frames.put(frame(1))  # of 48 bytes
    assert frames.put(frame(2))
    assert not frames.put(frame(3)), "no room for its rows"
    assert frames.put(frame(4, 0)), "what has none has room"
    assert frames.take(0.0).parts[0].request_id == "r1"
    assert not frames.put(frame(5)), "what is being sent counts"
    frames.take(0.0)
    assert frames.put(frame(6))
    assert all(frames.put(frame(i, 0)) for i in range(MAX_QUEUED_FRAMES - 2))
    assert not frames.put(frame(7, 0))
    assert frames.is_closed, "the other end does not read"


@pytest.mark.parametrize("num_rows", [1, SLOT_BYTES // 16, SLOT_BYTES // 16 + 1, SLOT_BYTES // 5])
def test_rows_larger_than_what_is_shared_arrive_in_turns(pair: Pair, num_rows: int) -> None:
    """Of 16 bytes: one slot, a little more, more than both."""
    link, end = pair
    rows = torch.arange(4.0 * num_rows).view(-1, 4)
    for _ in range(2):
        assert link.send(Frame((Part("a", 0, num_rows, num_rows),), (), rows))
        assert torch.equal(end.frames.get(timeout=DEADLINE_S).rows, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_gives_up_a_peer_that_hangs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for it: only its thread does."""
    monkeypatch.setattr(groups, "SILENCE_S", 0.5)
    end, own = End(), End()
    link, _ = link_by(kind, end, own=own)
    end.holds.clear()
    for _ in range(3):
        link.send(frame(1, 500_000))  # more than sockets hold
    assert own.reasons.get(timeout=DEADLINE_S)
    assert not link.send(frame(2))
    end.holds.set()
    assert end.reasons.get(timeout=DEADLINE_S), "the receiver is told"


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_gives_up_a_silent_peer_and_an_idle_one_lives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SILENCE_S", 1.0)
    monkeypatch.setattr(groups, "HEARTBEAT_S", 0.05)
    end = End()
    link, _ = link_by(kind, end)
    assert link.send(frame(1))
    end.frames.get(timeout=DEADLINE_S)
    with pytest.raises(queue.Empty):
        end.reasons.get(timeout=2.5)  # heartbeats come
    released = threading.Event()
    monkeypatch.setattr(link._wire, "send", lambda _: released.wait(DEADLINE_S))
    assert end.reasons.get(timeout=DEADLINE_S)
    released.set()
    link.close()


PART = {"request_id": "a", "start": 0, "stop": 2, "told_len": 2}
HEADER = {"parts": [PART], "ended": [], "shape": [2, 4], "dtype": "float32"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "header",
    [
        b"\xff",
        b"[]",
        *(json.dumps(one).encode() for one in (3, {"parts": []}, HEADER | {"dtype": 3}, HEADER | {"parts": [{"start": 1}]})),
        *(json.dumps(HEADER | {"dtype": name}).encode() for name in ("nn", "empty", "float64", "nowhere")),
        *(json.dumps(HEADER | {"shape": shape}).encode() for shape in ([2], [], [-2, 4], ["a", 4], [3, 4], [2, 2**62])),
        *(
            json.dumps(HEADER | {"parts": [PART | part]}).encode()
            for part in ({"start": 3}, {"stop": None}, {"stop": 10**9})
        ),
        -1,
        0,
        2**62,
    ],
    ids=str,
)
def test_whatever_a_peer_sends_ends_the_link_and_tells_its_end(kind: str, header: bytes | int) -> None:
    """A length alone, or a header without its rows."""
    end, length = End(), header if isinstance(header, int) else len(header)
    sent = b"" if isinstance(header, int) else header
    if kind == "shared":
        sender, _ = link_by(kind, end)
        sender._wire._socket.sendall(struct.pack("<I", length % 2**32) + sent)
    else:
        store = HashStore()
        with ThreadPoolExecutor(1) as executor:
            made = executor.submit(groups.GroupWire, store, 0, "127.0.0.1", CPU)
            TensorReceiver(groups.GroupWire(store, 1, "127.0.0.1", CPU), end.end)
            peer = made.result()
        for part in [torch.tensor([length]), *([torch.frombuffer(bytearray(sent), dtype=torch.uint8)] if sent else ())]:
            peer._host_group.send([part], 1, 0).wait()
    assert end.reasons.get(timeout=4.0), "before a silent peer would be given up"
    assert end.frames.empty()


@pytest.mark.parametrize("turn", [b"\x02", b""])
def test_a_peer_that_is_out_of_turn_ends_the_link(turn: bytes) -> None:
    """Or that is gone between a header and its rows."""
    end = End()
    sender, _ = link_by("shared", end)
    header = header_of(frame(1))
    sender._wire._socket.sendall(struct.pack("<I", len(header)) + header + turn)
    if not turn:
        sender._wire._socket.shutdown(socket.SHUT_RDWR)
    assert end.reasons.get(timeout=4.0)
    assert end.frames.empty()


_KILLED = """
import sys, threading, torch
from cluster.transport.tensors import TensorEnd
from cluster.transport.tensors.groups import call
print("calls", flush=True)
link = call(sys.argv[1], "drafter", torch.device("cpu"), TensorEnd(lambda frame: print("received", flush=True), print))
threading.Event().wait(60.0)
"""


def test_nothing_is_left_of_shared_memory_when_an_end_is_killed() -> None:
    """The kernel frees what no process maps; this one stops mapping it when its link ends."""

    def mapped() -> set[str]:
        """By inode."""
        return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "outrider-rows" in line}

    before, named, own = mapped(), sorted(os.listdir("/dev/shm")), End()
    meeting = Meeting("127.0.0.1")
    process = subprocess.Popen([sys.executable, "-c", _KILLED, meeting.address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "calls\n"
    link = meeting.answer("drafter", CPU, own.end)
    (own_memory,) = mapped() - before
    link.send(frame(1))
    assert process.stdout.readline() == "received\n"
    process.kill()
    process.wait(DEADLINE_S)
    assert own.reasons.get(timeout=DEADLINE_S)
    assert not link.send(frame(2))
    assert own_memory not in mapped()
    assert sorted(os.listdir("/dev/shm")) == named
    process.stdout.close()


_PAUSED = """
import queue, threading, torch
from concurrent.futures import ThreadPoolExecutor
from cluster.transport.tensors import groups
from cluster.transport.tensors import Frame, Part, TensorEnd
groups.HEARTBEAT_S, groups.SILENCE_S = 0.1, 1.0
meeting, told = groups.Meeting("127.0.0.1"), queue.Queue()
end = TensorEnd(told.put, told.put)
with ThreadPoolExecutor(1) as executor:
    answered = executor.submit(meeting.answer, "drafter", torch.device("cpu"))
    receiver = groups.call(meeting.address, "drafter", torch.device("cpu"), end)
input("up\\n")
answered.result().send(Frame((Part("r", 0, 0, 1),)))
print(type(told.get()).__name__, flush=True)
"""


def test_a_link_lives_through_a_pause_of_both_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", _PAUSED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        threading.Event().wait(2.0)
        process.send_signal(signal.SIGCONT)
        threading.Event().wait(0.2)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "Frame\n"
    process.kill()
    process.wait(DEADLINE_S)
    process.stdin.close()
    process.stdout.close()


def test_rows_go_over_gloo_where_a_process_may_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SLOT_BYTES", -1)  # which the kernel refuses
    end = End()
    link, _ = link_by("gloo", end, meeting=Meeting("127.0.0.1"))
    link.send(frame(1))
    assert end.frames.get(timeout=DEADLINE_S).parts == frame(1).parts
    link.close()


def test_a_stranger_that_comes_first_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((False, True, True))
    monkeypatch.setattr(shared, "_is_own", lambda _: next(answers))
    offer = shared.Offer(DEADLINE_S)
    with ThreadPoolExecutor(1) as executor, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{offer.name}")
        accepted = executor.submit(offer.accept, DEADLINE_S)
        assert not stranger.recv(1)
        reached = shared.reach(offer.name, DEADLINE_S)
        assert reached is not None
        shared.joined(reached, DEADLINE_S).leave()
        accepted.result().leave()


def test_memory_that_a_peer_could_shrink_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would end the process."""
    monkeypatch.setattr(shared.fcntl, "fcntl", lambda *_: 0)
    meeting = Meeting("127.0.0.1")
    with ThreadPoolExecutor(1) as executor:
        executor.submit(meeting.answer, "drafter", CPU)
        with pytest.raises(LinkClosed, match="is not sealed"):
            call(meeting.address, "drafter", CPU, End().end)


EXITING = """
import sys, time, torch
from cluster.transport.tensors import TensorEnd
from cluster.transport.tensors.groups import call

class Late:  # the interpreter takes its time to end, so that threads come back from torch meanwhile
    def __del__(self, sleep=time.sleep):
        sleep(3.0)

late = Late()
print("calls", flush=True)
call(sys.argv[1], "d", torch.device("cpu"), TensorEnd(print, print))
"""


def test_a_process_that_exits_with_an_open_link_is_not_aborted() -> None:
    meeting = Meeting("127.0.0.1", shares_memory=False)
    command = [sys.executable, "-c", EXITING, meeting.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "calls\n"
        sender = meeting.answer("d", CPU)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    sender.close()
    assert (process.returncode, stderr) == (0, "")


def test_a_link_that_is_left_at_exit_is_waited_for() -> None:
    end, leave = End(), mock.Mock(side_effect=partial(threading.Event().wait, 0.5))
    TensorReceiver(mock.Mock(receive=mock.Mock(side_effect=OSError), leave=leave), end.end)
    eventually(lambda: leave.called)
    groups._leave_torch()
    assert end.reasons.qsize() == 1


def test_an_end_that_cannot_take_a_frame_ends_the_link() -> None:
    states, end = ReceivedStates((1,), torch.zeros(9, 8)), End()
    link, _ = link_by("shared", SimpleNamespace(end=TensorEnd(partial(states.receive, 1), end.reasons.put)))
    link.send(frame(0))
    assert "width 4, not 8" in end.reasons.get(timeout=DEADLINE_S)
    link.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_frame_that_cannot_be_told_ends_the_link_at_both_ends() -> None:
    end, own, others = End(), End(), set(threading.enumerate())
    link, _ = link_by("shared", end, own=own)
    link.send(Frame((Part("\ud800", 0, 0, 1),)))
    assert own.reasons.get(timeout=DEADLINE_S)
    assert end.reasons.get(timeout=DEADLINE_S)
    assert not link.send(frame(0)), "the queue takes no more"
    eventually(lambda: others.issuperset(threading.enumerate()))  # their exception is of this test


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_comes_back_meets_its_new_peer(kind: str) -> None:
    meeting, ends = Meeting("127.0.0.1", shares_memory=kind == "shared"), [End(), End()]
    first, _ = link_by(kind, ends[0], meeting=meeting)
    second, _ = link_by(kind, ends[1], meeting=meeting)
    for number, link in enumerate((first, second)):
        link.send(frame(number))
        assert ends[number].frames.get(timeout=DEADLINE_S).parts == frame(number).parts
        link.close()
        assert ends[number].reasons.get(timeout=DEADLINE_S)


@contextmanager
def impatient() -> Iterator[None]:
    """Who meets nobody gives up soon."""
    with mock.patch.object(groups, "_MEET", groups.timedelta(seconds=0.3)):
        yield


@impatient()
def test_nobody_who_calls_or_answers_is_waited_for_without_end() -> None:
    meeting = Meeting("127.0.0.1")
    with pytest.raises(LinkClosed, match="did not call"):
        meeting.answer("drafter", CPU)
    for address in (meeting.address, "", "elsewhere"):
        with pytest.raises(LinkClosed, match="no hidden states from"):
            call(address, "drafter", CPU, End().end)


def test_a_caller_that_was_not_met_is_not_met_later() -> None:
    meeting = Meeting("127.0.0.1")
    with impatient():
        with pytest.raises(LinkClosed):
            call(meeting.address, "drafter", CPU, End().end)
        with pytest.raises(LinkClosed, match="wait timeout"):  # for the next call, however late that is
            meeting.answer("drafter", CPU)
    end = End()
    link, _ = link_by("shared", end, meeting=meeting)
    link.send(frame(1))
    assert end.frames.get(timeout=DEADLINE_S).parts == frame(1).parts
    link.close()


@pytest.mark.parametrize(("gpus", "is_taken"), [("ab", True), ("aa", False), (("a", ""), False)])
def test_nccl_takes_rows_between_two_gpus_alone(gpus: Sequence[str], is_taken: bool) -> None:
    """It refuses one GPU twice, and waits without end for a peer that has its rows in host memory."""
    end, left, made = End(), list(gpus), mock.Mock()
    with mock.patch.multiple(groups, _gpu_of=lambda _: left.pop(), _nccl_pair=made):
        link, _ = link_by("gloo", end)
    assert made.call_count == 2 * is_taken
    if not is_taken:
        link.send(frame(1))
        assert torch.equal(end.frames.get(timeout=DEADLINE_S).rows, frame(1).rows)
    link.close()


def test_a_communicator_that_fails_ends_no_process() -> None:
    """torch reads how errors of NCCL are handled when a group is made; others made here keep their own way."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", list[str | None]()

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get(name))

    with mock.patch.object(groups.dist, "ProcessGroupNCCL", Group, create=True), mock.patch.dict(os.environ):
        for before in ({name: "1"}, {}):
            os.environ.pop(name, None)
            os.environ.update(before)
            groups._nccl_pair(HashStore(), 0)
            assert os.environ.get(name) == before.get(name)
    assert seen == ["2", "2"]
