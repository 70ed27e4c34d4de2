"""Fixtures of the transport contract: an address per transport, and both ends of its links."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.links import DEADLINE_S, Ends, Wiretap, address_of


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for sockets: pytest's own may be too long for the kernel."""
    path = Path(tempfile.mkdtemp(prefix="outrider-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["memory", "unix", "grpc"])
def address(request: pytest.FixtureRequest, folder: Path) -> str:
    return address_of(request.param, folder)


@pytest.fixture(params=["unix", "grpc"])
def remote_address(request: pytest.FixtureRequest, folder: Path) -> str:
    """Of the transports that leave the process."""
    return address_of(request.param, folder)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for child in ends.children:
        child.kill()
        child.communicate(timeout=DEADLINE_S)
    for closable in (*ends.wires, *ends.links, *ends.listeners):
        closable.close()


@pytest.fixture
def tap(folder: Path) -> Iterator[Wiretap]:
    tap = Wiretap(folder)
    yield tap
    tap.close()
