"""Faults that ``outrider bench faults`` injects into the processes of a running server, from outside."""

import fcntl
import json
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.load import HttpTarget, LoadRequest
from benchmarks.server import ServerProcess
from benchmarks.unsound import Unsound
from cluster.errors import InvalidField, OutriderError
from cluster.messages import Hello, Role
from cluster.transport import connect
from cluster.transport.base import LinkDown, Mailbox
from engine.models.config import load_config
from engine.models.tokenizer import fingerprint

ACTORS = ("TargetActor", "DrafterActor", "RouterActor", "ModelChainScheduler", "PoolSupervisor", "ServeReplica")
NUM_HOSTILE = 40
NUM_UNSOUND = 400  # maximum per faulty peer; its link is closed before
UNLINK_S = 30.0
SLOW_PERIOD_S = 0.5
SOCKET_POLL_S = 0.01


def running(server: ServerProcess) -> dict[str, set[psutil.Process]]:
    """The server's processes by actor class."""
    return {actor: set(server.workers(actor)) for actor in ACTORS}


def lost(before: dict[str, set[psutil.Process]], killed: set[psutil.Process]) -> list[str]:
    """Processes of ``before`` that ended without being killed."""
    return [
        f"{actor} {process.pid}"
        for actor, processes in before.items()
        for process in processes - killed
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    ]


def target_address(server: ServerProcess) -> str:
    """The target's address: the only unix socket of that name."""
    (target,) = server.workers("TargetActor")
    paths = {str(connection.laddr) for connection in target.net_connections("unix") if connection.laddr}
    return next(f"unix://{path}" for path in sorted(paths) if path.endswith("target-0.sock"))


def unlinked_peers(server: ServerProcess, model_folder: Path, secret: str) -> int:
    """Runs a drafter and a gateway that send invalid messages. Returns how many of the two the target disconnected."""
    address, vocab_size = target_address(server), load_config(model_folder).vocab_size
    num_unlinked = 0
    for role in (Role.DRAFTER, Role.GATEWAY):
        mailbox = Mailbox()
        link = connect(address, mailbox, Hello(role, "faulty", vocab_size, fingerprint(model_folder), secret))
        draws = Unsound(seed=1, request_ids=[], drafter="faulty", vocab_size=vocab_size)
        try:
            for _ in range(NUM_UNSOUND):
                link.send(draws.proposal_round() if role is Role.DRAFTER else draws.submit_round())
                time.sleep(0.005)
            until_s = time.monotonic() + UNLINK_S
            while not any(isinstance(event, LinkDown) for event in mailbox.drain()):
                if time.monotonic() > until_s:
                    break
                mailbox.wait(1.0)
            else:
                num_unlinked += 1
        except OutriderError:
            num_unlinked += 1
        finally:
            link.close()
    return num_unlinked


@contextmanager
def locked_state(folder: Path) -> Iterator[None]:
    """Prevents other writes to a state folder."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _limited(process: psutil.Process, kind: int, limit: int) -> Iterator[None]:
    soft, hard = process.rlimit(kind)
    process.rlimit(kind, (limit, hard))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(kind, (soft, hard))


def without_descriptors(process: psutil.Process) -> AbstractContextManager[None]:
    """Prevents a process from opening files and sockets."""
    return _limited(process, resource.RLIMIT_NOFILE, 3)


def without_disk(process: psutil.Process) -> AbstractContextManager[None]:
    """Each write to a file fails (EFBIG), as on a full disk (ENOSPC)."""
    return _limited(process, resource.RLIMIT_FSIZE, 0)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def hostile_clients(server: HttpTarget, seconds: float) -> None:
    """Half requests, garbage, huge lengths, and streams that nobody reads, all at once; reset after a while."""
    body = json.dumps(server.body(LoadRequest("unread", (1, 2, 3), 500))).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    words = (post, b"\x16\x03\x01" * 99, post + b"999999999999\r\n\r\n{", post + b"%d\r\n\r\n" % len(body) + body)
    with ExitStack() as stack:
        for i in range(NUM_HOSTILE):
            client = stack.enter_context(socket.create_connection((server.host, server.port), UNLINK_S))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):  # refused at once
                client.sendall(words[i % len(words)])
        time.sleep(seconds)


@contextmanager
def slowed(process: psutil.Process, factor: float) -> Iterator[None]:
    """Suspends a process for part of the time, as on a machine slower by ``factor``."""
    ended = threading.Event()

    def hinder() -> None:
        while not ended.is_set():
            process.send_signal(signal.SIGSTOP)
            ended.wait(SLOW_PERIOD_S * (1.0 - 1.0 / factor))
            process.send_signal(signal.SIGCONT)
            ended.wait(SLOW_PERIOD_S / factor)

    hindering = threading.Thread(target=hinder, name="slow down", daemon=True)
    hindering.start()
    try:
        yield
    finally:
        ended.set()
        hindering.join()


def overheard(address: str, seconds: float) -> bytes:
    """Listens at the address of a process that has just died, and returns what its peers send."""
    path, heard = Path(address.removeprefix("unix://")), bytearray()
    until_s = time.monotonic() + seconds
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(path))
        impostor.listen()
        while (left_s := until_s - time.monotonic()) > 0:
            impostor.settimeout(left_s)
            try:
                victim, _ = impostor.accept()
                with victim:
                    victim.settimeout(max(SOCKET_POLL_S, until_s - time.monotonic()))
                    heard += victim.recv(2**16)
            except TimeoutError:
                break
    path.unlink(missing_ok=True)
    return bytes(heard)


def is_refused(address: str, model_folder: Path) -> bool:
    """Whether a target refuses a peer that does not know the secret."""
    hello = Hello(Role.DRAFTER, "stranger", load_config(model_folder).vocab_size, fingerprint(model_folder), "a guess")
    try:
        connect(address, Mailbox(), hello).close()
    except InvalidField:
        raise
    except OutriderError:
        return True
    return False
