"""Links that carry tensors beside control links, from a target to a drafter on another device: their protocol, and the
bounded queue in front of one."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from pydantic import NonNegativeInt, TypeAdapter

if TYPE_CHECKING:
    from torch import Tensor

MAX_QUEUED_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 2**24
MAX_QUEUED_FRAMES = 4096  # beyond, the other end does not read, and the link ends


@dataclass(frozen=True, slots=True)
class Part:
    """Rows start .. stop - 1 of a request, possibly none. ``told_len``: all that exist; more than ``stop`` if the rest never
    comes."""

    request_id: str
    start: int
    stop: int
    told_len: int


@dataclass(frozen=True, slots=True)
class Frame:
    """``rows``: of all ``parts``, one behind the other, [rows, width]; None: of none. ``ended``: requests to forget."""

    parts: tuple[Part, ...]
    ended: tuple[str, ...] = ()
    rows: "Tensor | None" = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.rows is None else self.rows.numel() * self.rows.element_size()


_Dtype = Literal["", "float32", "bfloat16", "float16"]
_ITEM_BYTES: dict[_Dtype, int] = {"": 0, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes the rows of a frame between processes. ``dtype``: of the rows; empty where no rows follow."""

    parts: tuple[Part, ...]
    ended: tuple[str, ...]
    shape: tuple[NonNegativeInt, NonNegativeInt]
    dtype: _Dtype


_HEADER = TypeAdapter(Header)


def header_of(frame: Frame) -> bytes:
    num_rows, width = (0, 0) if frame.rows is None else frame.rows.shape
    dtype = "" if frame.rows is None else str(frame.rows.dtype).removeprefix("torch.")
    return _HEADER.dump_json(Header(frame.parts, frame.ended, (num_rows, width), cast(_Dtype, dtype)))


def read_header(data: bytes) -> Header:
    """Raises ValueError: no header, or one with other rows than its parts have, or more than a peer may queue."""
    told = _HEADER.validate_json(data)
    num_rows, width = told.shape
    lens = [part.stop - part.start for part in told.parts]
    num_bytes = num_rows * width * _ITEM_BYTES[told.dtype]
    if min(lens, default=0) < 0 or sum(lens) != num_rows or num_bytes > MAX_QUEUED_BYTES:
        raise ValueError(f"{num_rows} rows of {width} {told.dtype} for {sum(lens)} of its parts")
    return told


class TensorLink(Protocol):
    """The sending end. Frames arrive in order and at most once; a link that breaks loses those in flight."""

    def send(self, frame: Frame) -> bool:
        """Queues a frame without waiting, for the device neither. False: there is no room for its rows; it is dropped."""

    def close(self) -> None:
        """Idempotent. The other end is told, this end is not."""


@dataclass(frozen=True, slots=True)
class TensorEnd:
    """What the receiving end calls, on a thread of the link: ``receive`` for each frame, and ``down`` once with a reason,
    which the sending end calls, too."""

    receive: Callable[[Frame], None]
    down: Callable[[str], None]


class FrameQueue:
    """Thread-safe."""

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_bytes, self._num_bytes, self._num_taken = max_bytes, 0, 0
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self.is_closed = False

    def put(self, frame: Frame) -> bool:
        with self._changed:
            has_room = self._num_bytes + frame.num_bytes <= self._max_bytes or not frame.num_bytes
            if self.is_closed or not has_room:
                return False
            if len(self._frames) >= MAX_QUEUED_FRAMES:
                self.is_closed = True
            self._frames.append(frame)
            self._num_bytes += frame.num_bytes
            self._changed.notify_all()
            return not self.is_closed

    def take(self, timeout_s: float) -> Frame | None:
        """The oldest, waited for; None: none comes in time, or the queue is closed. Its bytes count until the next call."""
        with self._changed:
            self._num_bytes -= self._num_taken
            self._num_taken = 0
            self._changed.wait_for(lambda: self._frames or self.is_closed, timeout_s)
            if not self._frames or self.is_closed:
                return None
            frame = self._frames.popleft()
            self._num_taken = frame.num_bytes
            return frame

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._frames.clear()
            self._changed.notify_all()
