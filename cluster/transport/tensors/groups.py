"""Tensor links over torch.distributed, a process group for each pair of processes: gloo for headers, and for rows in host
memory; NCCL, on a stream of its own, for rows on GPUs.

The target's process listens (``Meeting``); a drafter calls (``call``) once its control link is up, and is called back by
number (``answer``), so that an end that was lost is never met again. As between ranks, ends do not authenticate each other:
between machines the network must be private.
"""

import os
import socket
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from pydantic import NonNegativeInt, TypeAdapter
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cluster.errors import LinkClosed
from cluster.transport.tensors.base import MAX_QUEUED_BYTES, Frame, FrameQueue, Part, TensorEnd

MEET_S = 10.0
HEARTBEAT_S, SILENCE_S = 1.0, 6.0  # as of control links
MAX_HEADER_BYTES = 2**24
_SENDER, _RECEIVER = 0, 1
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()


class Meeting:
    """Where drafters meet a target. ``host``: that it listens at; only 127.0.0.1 is closed to other machines."""

    def __init__(self, host: str) -> None:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        self.host, self.address = host, f"{host}:{port}"
        self._store = TCPStore(
            host, port, is_master=True, timeout=_MEET, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def answer(self, name: str, device: torch.device, end: TensorEnd | None = None) -> "TensorSender":
        """The link to the newest caller ``name``, if it still waits for an answer. Waits MEET_S. Raises LinkClosed."""
        try:
            store = _client(self.address)
            store.wait([f"{name}/waits"], _MEET)
            store.delete_key(f"{name}/waits")  # first, so that the number is of no earlier call
            number = store.add(f"{name}/calls", 0)
            return TensorSender(PrefixStore(f"{name}/{number}", store), self.host, device, end)
        except RuntimeError as error:
            raise LinkClosed(f"{name} did not call for hidden states: {error}") from error


_MEET = timedelta(seconds=MEET_S)


def call(address: str, name: str, device: torch.device, end: TensorEnd) -> "TensorReceiver":
    """The receiving end of a link to the ``Meeting`` at ``address``. Waits MEET_S at most. Raises LinkClosed."""
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), MEET_S) as reached:
            own_host = reached.getsockname()[0]  # at which the target reaches this machine
        store = _client(address)
        number = store.add(f"{name}/calls", 1)
        store.set(f"{name}/waits", "")
        try:
            return TensorReceiver(PrefixStore(f"{name}/{number}", store), own_host, device, end)
        except RuntimeError:
            if store.add(f"{name}/calls", 0) == number:  # an answer that comes before the next call is not to this one
                store.delete_key(f"{name}/waits")
            raise
    except (RuntimeError, OSError, ValueError) as error:  # the last: the target has no address
        raise LinkClosed(f"no hidden states from {address}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Header:
    """What precedes the rows of a frame. ``dtype``: of the rows; empty where no rows follow."""

    parts: tuple[Part, ...]
    ended: tuple[str, ...]
    shape: tuple[NonNegativeInt, NonNegativeInt]
    dtype: Literal["", "float32", "bfloat16", "float16"]


_HEADER = TypeAdapter(_Header)


def _read_header(data: bytes) -> _Header:
    """Raises ValueError: no header, or one with other rows than its parts have, or more than a peer may queue."""
    told = _HEADER.validate_json(data)
    num_rows, width = told.shape
    lens = [part.stop - part.start for part in told.parts]
    num_bytes = num_rows * width * getattr(torch, told.dtype).itemsize if told.dtype else 0
    if min(lens, default=0) < 0 or sum(lens) != num_rows or num_bytes > MAX_QUEUED_BYTES:
        raise ValueError(f"{num_rows} rows of {width} {told.dtype} for {sum(lens)} of its parts")
    return told


class _End:
    """One end of a pair."""

    def __init__(self, store: Store, rank: int, host: str, device: torch.device) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = _MEET, [gloo.create_device(hostname=host)]
        self._other, self._device = 1 - rank, device
        self._host_group: Any = gloo(PrefixStore("host", store), rank, 2, options)
        self._group, self._stream = self._host_group, cast(Any, None)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._group = _nccl_pair(PrefixStore("device", store), rank)
            self._stream = torch.cuda.Stream(device)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _leave(self) -> None:
        """Ends the connection, so that the other end is told at once. On the thread that uses it."""
        if self._stream is not None:
            self._group.abort()  # what is under way with a peer that is lost never ends
        self._host_group = self._group = None

    def _wait(self, work: Any) -> None:
        """For a transfer, on this thread alone. Raises RuntimeError: the peer is gone, or silent."""
        work.wait(timedelta(seconds=SILENCE_S))
        if self._stream is not None:
            self._stream.synchronize()


class TensorSender(_End):
    """``TensorLink``. ``end``: is told when the link breaks."""

    def __init__(
        self,
        store: Store,
        host: str,
        device: torch.device,
        end: TensorEnd | None = None,
        max_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        super().__init__(store, _SENDER, host, device)
        self._queue = FrameQueue(max_bytes)
        self._ready: Any = None  # of the newest rows, on a GPU
        self._end = end
        threading.Thread(target=self._run, name="tensors out", daemon=True).start()

    def send(self, frame: Frame) -> bool:
        if self._stream is not None and frame.rows is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()
        return self._queue.put(frame)

    def close(self) -> None:
        self._queue.close()

    def _run(self) -> None:
        reason = "it was closed"
        try:
            while not self._queue.is_closed:
                self._send(self._queue.take(HEARTBEAT_S) or Frame(()))
        except RuntimeError as error:
            reason = str(error)
        self._queue.close()
        self._leave()
        if self._end is not None:
            self._end.down(reason)

    def _send(self, frame: Frame) -> None:
        rows = frame.rows
        shape = [0, 0] if rows is None else list(rows.shape)
        dtype = "" if rows is None else str(rows.dtype).removeprefix("torch.")
        told = _HEADER.dump_json(_Header(frame.parts, frame.ended, (shape[0], shape[1]), cast(Any, dtype)))
        header = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        for part in (torch.tensor([len(header)]), header):
            self._host_group.send([part], self._other, 0).wait(timedelta(seconds=SILENCE_S))
        if rows is not None:
            with self._on_stream():
                if self._stream is not None:
                    self._stream.wait_event(self._ready)
                self._wait(self._group.send([rows.contiguous()], self._other, 0))


class TensorReceiver(_End):
    """Serves ``end`` on a thread until the link breaks, or ``close``."""

    def __init__(self, store: Store, host: str, device: torch.device, end: TensorEnd) -> None:
        super().__init__(store, _RECEIVER, host, device)
        self._end = end
        self._is_closed = False
        threading.Thread(target=self._run, name="tensors in", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        reason = "it was closed"
        try:
            while not self._is_closed:
                frame = self._receive()
                if frame.parts or frame.ended:
                    self._end.receive(frame)
        except (RuntimeError, ValueError) as error:
            reason = str(error)
        finally:  # whatever it was: a request waits for rows as long as the link is up
            self._leave()
            self._end.down(reason)

    def _receive(self) -> Frame:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(self._host_group.recv([length], self._other, 0))
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {int(length)} bytes")
        header = torch.empty(int(length), dtype=torch.uint8)
        self._wait(self._host_group.recv([header], self._other, 0))
        told = _read_header(header.numpy().tobytes())
        rows: Tensor | None = None
        if told.dtype:
            with self._on_stream():
                rows = torch.empty(told.shape, dtype=getattr(torch, told.dtype), device=self._device)
                self._wait(self._group.recv([rows], self._other, 0))
            if self._stream is not None:  # read from here on the stream of this thread, which may outlast the frame
                rows.record_stream(torch.cuda.current_stream(self._device))
        return Frame(told.parts, told.ended, rows)


def _nccl_pair(store: Store, rank: int) -> Any:
    """A group that only aborts its communicator at an error, which then is an exception of the transfer. By default torch's
    watchdog ends the process: a lost drafter would end its target. No option of a group says so, only the environment,
    which a group reads when it is made."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _MEET
    with _environment:
        before = os.environ.get(_ON_ERROR)
        os.environ[_ON_ERROR] = "2"  # CleanUpOnly
        try:
            return nccl(store, rank, 2, options)
        finally:
            os.environ.pop(_ON_ERROR)
            os.environ |= {} if before is None else {_ON_ERROR: before}


def _client(address: str) -> Store:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=_MEET)
