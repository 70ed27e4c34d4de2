"""What a target's actor answers while it loads, and what it tells of where it is."""

import pytest

from actors.target import TargetActor
from cluster.config import Config
from cluster.transport import as_seen_from_elsewhere, at_node
from cluster.types import RoutingTable


def test_a_target_that_has_not_begun_has_nothing_to_report_and_takes_no_table() -> None:
    actor = TargetActor(Config(), "target-0", "grpc://0.0.0.0:0", "secret")
    assert actor.slot_report() is None
    actor.publish_table(RoutingTable(version=1))


@pytest.mark.parametrize(
    ("address", "host", "seen"),
    [
        ("grpc://0.0.0.0:50051", "10.0.0.7", "grpc://10.0.0.7:50051"),
        ("grpc://[::]:50051", "fd00::7", "grpc://[fd00::7]:50051"),
        ("grpc://127.0.0.1:50051", "10.0.0.7", "grpc://127.0.0.1:50051"),
        ("grpc://node-3:50051", "10.0.0.7", "grpc://node-3:50051"),
        ("unix:///tmp/target-0.sock", "10.0.0.7", "unix:///tmp/target-0.sock"),
    ],
)
def test_every_interface_is_told_as_the_address_of_the_node(address: str, host: str, seen: str) -> None:
    assert as_seen_from_elsewhere(address, host) == seen


@pytest.mark.parametrize(
    ("address", "host", "listened"),
    [
        ("grpc://node:0", "10.0.0.7", "grpc://10.0.0.7:0"),
        ("grpc://node:0", "fd00::7", "grpc://[fd00::7]:0"),
        ("grpc://0.0.0.0:0", "10.0.0.7", "grpc://0.0.0.0:0"),
        ("grpc://node-3:0", "10.0.0.7", "grpc://node-3:0"),
    ],
)
def test_a_target_listens_at_the_address_of_its_node(address: str, host: str, listened: str) -> None:
    assert at_node(address, host) == listened
