"""Where a process that deployed the API reaches it."""

import pytest

from deploy.deployment import answering_host

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::3"}


@pytest.mark.parametrize(
    ("host", "here", "proxies", "reached"),
    [
        ("0.0.0.0", "a", {"a", "b"}, "127.0.0.1"),
        ("::", "a", {"a"}, "::1"),
        ("0.0.0.0", "b", {"a"}, "10.0.0.1"),
        ("::", "b", {"c"}, "fd00::3"),
        ("10.0.0.9", "b", {"a"}, "10.0.0.9"),
    ],
    ids=["here", "here with IPv6", "on another machine", "on another with IPv6", "at an address"],
)
def test_the_api_is_reached_where_a_proxy_is(host: str, here: str, proxies: set[str], reached: str) -> None:
    assert answering_host(host, here, proxies, ADDRESSES) == reached
