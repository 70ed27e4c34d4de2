"""A TCP proxy in front of the ports of links, which cuts, delays and resets connections."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

READ_BYTES = 2**16
QUEUE_LEN = 64  # pieces on their way, of one direction
CALL_S = 10.0
_LOOPBACK = "127.0.0.1"


@dataclass(slots=True, eq=False)
class _Connection:
    port: int  # of the listener behind the proxy
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None


@dataclass(slots=True)
class _Network:
    """The state of the network. Used on the proxy's loop only."""

    connections: set[_Connection] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)  # ports whose connections carry nothing, in neither direction
    mended: asyncio.Condition = field(default_factory=asyncio.Condition)
    max_delay_s: float = 0.0


class LinkProxy:
    """A context manager. A connection to 127.x.y.1 goes on to port 256 x + y of this machine.

    Bytes of one connection stay in order, as TCP delivers them. Delayed messages of different ones overtake each other.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._network = _Network()
        self._draws = random.Random(1)
        self._listening = socket.create_server(("0.0.0.0", 0))  # so that it accepts at every loopback address
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="link proxy", daemon=True)

    def num_links(self) -> int:
        """Connections of which both ends are open."""
        return sum(connection.far is not None for connection in tuple(self._network.connections))

    def ports(self) -> list[int]:
        """Of the listeners that have links."""
        return sorted({connection.port for connection in tuple(self._network.connections) if connection.far is not None})

    @contextmanager
    def cut(self, *ports: int) -> Iterator[None]:
        """Nothing passes to or from the ports, and neither end is told."""
        self._call(self._set_cut(set(ports)))
        try:
            yield
        finally:
            self._call(self._set_cut(set()))

    @contextmanager
    def delayed(self, max_s: float) -> Iterator[None]:
        """Each piece of a message takes up to ``max_s`` longer, in each direction."""
        self._network.max_delay_s = max_s
        try:
            yield
        finally:
            self._network.max_delay_s = 0.0

    def reset(self) -> None:
        """All connections end with a RST at both ends."""
        self._call(self._reset())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)

    # ---- on the proxy's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(asyncio.start_server(self._serve, sock=self._listening))
        self._loop.run_forever()
        serving.result().close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    async def _set_cut(self, ports: set[int]) -> None:
        network = self._network
        async with network.mended:
            network.cut = ports
            network.mended.notify_all()

    async def _reset(self) -> None:
        for connection in tuple(self._network.connections):
            for end in (connection.near, connection.far):
                if end is not None:
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        dialled = [int(part) for part in near.get_extra_info("sockname")[0].split(".")]
        connection = _Connection(256 * dialled[1] + dialled[2], near)
        self._network.connections.add(connection)
        try:
            await self._passage(connection.port)
            far_reader, connection.far = await asyncio.open_connection(_LOOPBACK, connection.port)
            directions = (reader, connection.far), (far_reader, near)
            async with asyncio.TaskGroup() as group:
                for source, sink in directions:
                    group.create_task(self._forward(connection, source, sink))
        except* OSError:
            pass  # nobody listens there, or an end is gone
        finally:
            self._network.connections.discard(connection)
            for end in (near, connection.far):
                if end is not None:
                    end.close()

    async def _forward(self, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Until the source ends. Raises ConnectionError then, which ends the other direction, too."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_LEN)
        reading = asyncio.create_task(self._read(source, on_the_way))
        try:
            while True:
                due_s, piece = await on_the_way.get()
                await asyncio.sleep(due_s - self._loop.time())
                await self._passage(connection.port)
                if not piece:
                    raise ConnectionResetError("the source has ended")
                sink.write(piece)
                await sink.drain()
        finally:
            reading.cancel()

    async def _read(self, source: asyncio.StreamReader, on_the_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        piece = b"?"
        due_s = 0.0
        while piece:
            try:
                piece = await source.read(READ_BYTES)
            except OSError:
                piece = b""
            delay_s = self._draws.uniform(0.0, self._network.max_delay_s)
            due_s = max(due_s, self._loop.time() + delay_s)  # TCP keeps the order
            await on_the_way.put((due_s, piece))

    async def _passage(self, port: int) -> None:
        network = self._network
        async with network.mended:
            await network.mended.wait_for(lambda: port not in network.cut)
