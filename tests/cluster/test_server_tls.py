"""A real server whose links are gRPC with mutual TLS: the tokens of one in a single process, and strangers are refused."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from cluster.config import Config, TlsConfig, TransportConfig
from cluster.errors import LinkClosed
from cluster.messages import Hello, Role
from cluster.transport import connect
from cluster.transport.base import Mailbox
from tests.support.certificates import Authority, not_after_s
from tests.support.servers import served, served_without_ray
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.streaming import MODEL, Streamed
from tests.support.tiny_model import write_tiny_model
from tests.support.waiting import eventually, gauge

pytestmark = pytest.mark.ray

NUM_STREAMS = 2
LONG = 120
SECRET = "of the test"
EXPIRY = "outrider_tls_not_after_timestamp_seconds"


def config_of(model: Path, folder: Path) -> Config:
    base = small_config(str(model), folder / "state")
    (folder / "secret").write_text(SECRET)
    return base.model_copy(
        update={
            "model": base.model.model_copy(update={"max_model_len": 512}),
            "target": base.target.model_copy(update={"kv_cache_gb": 0.02}),
            "drafters": base.drafters[:1],
            "planner": ALWAYS_DRAFTED,
            "cluster": base.cluster.model_copy(update={"token_file": folder / "secret"}),
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Named as the model that streams ask for."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / MODEL)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def server(model: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = config_of(model, folder := tmp_path_factory.mktemp("tls"))
    cluster = config.cluster.model_copy(update={"tls": authority.issue(folder / "certificates")})
    with served(config.model_copy(update={"cluster": cluster, "transport": TransportConfig(host="127.0.0.1")})) as server:
        yield server


def texts(url: str, drafting: str) -> dict[int, str]:
    streamed = Streamed(url, LONG, drafting=drafting)
    streamed.start(NUM_STREAMS)
    streamed.wait_end()
    assert not streamed.errors
    return streamed.texts


def test_links_with_tls_serve_the_tokens_of_links_without(
    server: ServerProcess, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    drafted: dict[int, str] = {}
    with server.client() as http:

        def has_drafted() -> bool:  # so the drafter is linked, too
            drafted.update(texts(server.url, "ngram"))
            return gauge(http, "outrider_drafter_verified_total", "ngram") > 0

        eventually(has_drafted)
    with served_without_ray(config_of(model, tmp_path_factory.mktemp("plain"))) as plain:
        assert texts(plain, "off") == drafted


def test_the_end_of_the_certificate_is_a_metric_and_follows_its_renewal(server: ServerProcess, authority: Authority) -> None:
    assert server.config.cluster.tls is not None
    cert_file = server.config.cluster.tls.cert_file
    with server.client() as http:
        assert gauge(http, EXPIRY) == not_after_s(cert_file.read_bytes())
        authority.issue(cert_file.parent, age=timedelta(hours=20))
        eventually(lambda: gauge(http, EXPIRY) == not_after_s(cert_file.read_bytes()))
        authority.issue(cert_file.parent)


def target_addresses(server: ServerProcess) -> list[str]:
    """Of the ports at which the target's process listens, one of which is for links; the others are Ray's."""
    (target,) = server.workers("TargetActor")
    listening = (one for one in target.net_connections("tcp") if one.status == "LISTEN")
    return [f"grpc://127.0.0.1:{one.laddr.port}" for one in listening]


def test_who_knows_the_secret_and_has_no_certificate_gets_no_link(
    server: ServerProcess, authority: Authority, tmp_path: Path
) -> None:
    hello = Hello(Role.GATEWAY, "stranger", 257, "", SECRET)

    def links(tls: TlsConfig | None) -> int:
        num_links = 0
        for address in target_addresses(server):
            try:
                connect(address, Mailbox(), hello, 5.0, tls=tls).close()
                num_links += 1
            except LinkClosed:
                pass
        return num_links

    assert links(None) == 0
    assert links(Authority("another").issue(tmp_path / "theirs")) == 0
    ours = authority.issue(tmp_path / "ours")
    eventually(lambda: links(ours) == 1)  # a slow target is late
    assert texts(server.url, "ngram") == texts(server.url, "off")
