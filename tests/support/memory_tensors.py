"""A tensor link within a process, for tests."""

import threading

from cluster.transport.tensors import MAX_QUEUED_BYTES, Frame, FrameQueue, TensorEnd

_WAIT_S = 1.0


class MemoryTensors:
    """``TensorLink`` to ``end``, which a thread serves. While ``allow`` is cleared nothing is delivered: the peer hangs."""

    def __init__(self, end: TensorEnd, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._end = end
        self._queue = FrameQueue(max_bytes)
        self.allow = threading.Event()
        self.allow.set()
        threading.Thread(target=self._run, name="tensors", daemon=True).start()

    def send(self, frame: Frame) -> bool:
        return self._queue.put(frame)

    def close(self) -> None:
        self._queue.close()
        self.allow.set()

    def _run(self) -> None:
        while not self._queue.is_closed:
            self.allow.wait()
            frame = self._queue.take(_WAIT_S)
            if frame is not None:
                self._end.receive(frame)
        self._end.down("it was closed")
