"""Passes Ethernet frames between two interfaces of this machine: late, slowly, or not at all."""

import heapq
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

# Of <linux/if_packet.h> and <linux/if_ether.h>.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 263, 15, 23, 3
_FRAME_BYTES = 2**17  # a frame that the kernel has not segmented yet, with its header
_MAX_QUEUED = 4096  # frames; those beyond are lost, as in a switch


@dataclass(frozen=True, slots=True)
class Impairment:
    """Of a link, in each direction. ``loss``: fraction of its frames. ``deaf``: nothing comes back from the far end."""

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float | None = None
    deaf: bool = False


@contextmanager
def forwarded(near: str, far: str, how: Impairment) -> Iterator[None]:
    """In the block, frames pass between two interfaces. Needs root."""
    with ExitStack() as stack:
        ends = [stack.enter_context(_opened(name)) for name in (near, far)]
        asked, asks = socket.socketpair()
        stack.enter_context(asked)
        thread = threading.Thread(target=_forward, args=(*ends, asked, how), name=f"forward {near}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            asks.close()
            thread.join()


@contextmanager
def _opened(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as end:
        end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)  # segments and checksums are left to who receives the frame
        end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        end.bind((name, _ETH_P_ALL))
        end.setblocking(False)
        yield end


def _forward(near: socket.socket, far: socket.socket, ended: socket.socket, how: Impairment) -> None:
    draws, numbers = random.Random(1), count()
    queue: list[tuple[float, int, socket.socket, bytes]] = []
    free_s = {near: 0.0, far: 0.0}  # when the link has sent what was given to it
    with selectors.DefaultSelector() as selector:
        for source, sink in ((near, far), (far, near)):
            selector.register(source, selectors.EVENT_READ, sink)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
            for key, _ in selector.select(wait_s):
                if key.fileobj is ended:
                    return
                frame = os.read(key.fd, _FRAME_BYTES)
                to: socket.socket = key.data
                is_lost = draws.random() < how.loss or (how.deaf and to is near)
                if is_lost or len(queue) >= _MAX_QUEUED:
                    continue
                now_s = time.monotonic()
                free_s[to] = max(now_s, free_s[to]) + (len(frame) / how.bytes_per_s if how.bytes_per_s else 0.0)
                heapq.heappush(queue, (free_s[to] + how.delay_s, next(numbers), to, frame))
            while queue and queue[0][0] <= time.monotonic():
                _, _, sink, frame = heapq.heappop(queue)
                with suppress(OSError):  # the other interface is down, or full
                    sink.send(frame)
