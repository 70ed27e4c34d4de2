"""Where a process that deployed the API reaches it."""

import pytest
from ray.serve.schema import ProxyStatus

from cluster.errors import InvalidField
from deploy.deployment import answering_host

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::3"}
BUSY, WELL = ProxyStatus.UNHEALTHY, ProxyStatus.HEALTHY


@pytest.mark.parametrize(
    ("host", "here", "proxies", "reached"),
    [
        ("0.0.0.0", "a", {"a": WELL, "b": WELL}, "127.0.0.1"),
        ("::", "a", {"a": WELL}, "::1"),
        ("0.0.0.0", "b", {"a": WELL}, "10.0.0.1"),
        ("::", "b", {"c": WELL}, "fd00::3"),
        ("0.0.0.0", "c", {"a": BUSY, "b": WELL}, "10.0.0.2"),
        ("0.0.0.0", "a", {"a": BUSY, "b": WELL}, "10.0.0.2"),
        ("0.0.0.0", "a", {"b": BUSY}, "127.0.0.1"),
        ("10.0.0.9", "b", {"a": WELL}, "10.0.0.9"),
        ("127.0.0.1", "a", {"a": BUSY}, "127.0.0.1"),
    ],
)
def test_the_api_is_reached_where_a_healthy_proxy_is(
    host: str, here: str, proxies: dict[str, ProxyStatus], reached: str
) -> None:
    assert answering_host(host, here, proxies, ADDRESSES) == reached


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_refused_on_a_machine_without_a_proxy(host: str) -> None:
    with pytest.raises(InvalidField, match=r"api\.host.*0\.0\.0\.0"):
        answering_host(host, "b", {"a": WELL}, ADDRESSES)
