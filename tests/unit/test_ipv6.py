"""Processes of machines that have IPv6 addresses reach each other: by links, as ranks, and by tensor links."""

import socket

import pytest

from actors.ray_pool import Deployment
from cluster.config import Config
from cluster.messages import Hello, Role
from cluster.transport import connect, listen
from cluster.transport.base import Mailbox
from cluster.transport.tensors.groups import Meeting
from engine.tensor_parallel.group import Rendezvous, meet

HOST = "::1"


def _has_ipv6() -> bool:
    try:
        socket.create_server((HOST, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize("host", [HOST, f"[{HOST}]"])
def test_links(host: str) -> None:
    deployment = Deployment(Config.model_validate({"transport": {"host": host}}), {}, "", "")
    listener = listen(
        deployment.target_address("target-0"), Mailbox(), Hello(Role.TARGET, "target-0", 10, "tokenizer", "secret")
    )
    link = connect(listener.address, Mailbox(), Hello(Role.GATEWAY, "api", 10, "tokenizer", "secret"))
    link.close()
    listener.close()


def test_ranks() -> None:
    rendezvous = Rendezvous(HOST, timeout_s=10.0)
    meet(rendezvous.address, timeout_s=10.0).set("of", "another rank")
    assert rendezvous.store.get("of") == b"another rank"


def test_tensor_links_are_awaited_there() -> None:
    assert Meeting(HOST).address.startswith(f"{HOST}:")
