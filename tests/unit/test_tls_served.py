"""Target, drafter and gateway as their processes link them, over gRPC with `cluster.tls`, without Ray."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from actors.drafter import DrafterActor
from actors.gateway import LinkClient
from actors.target import TargetActor, TargetInfo
from cluster.client import ClusterStatus
from cluster.config import Config, DrafterConfig, ModelConfig, NgramOptions, TargetConfig, TlsConfig, TransportConfig
from cluster.resolve import Inventory, Node, resolve
from cluster.sampling_params import SamplingParams
from tests.support.certificates import Authority
from tests.support.requests import a_request
from tests.support.settings import ALWAYS_DRAFTED
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("known_costs")

NODES = Inventory((Node("here", 4.0),))
TOKEN = "secret"
DEADLINE_S = 20.0
SAMPLING = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)


async def _no_status() -> ClusterStatus:
    raise AssertionError("nobody asks")


class Served:
    """The processes of one target and one drafter on threads."""

    def __init__(self, model: Path, tls: TlsConfig | None, stack: ExitStack) -> None:
        base = Config(
            model=ModelConfig(name=str(model), max_model_len=256),
            target=TargetConfig(dtype="float32", device="cpu", kv_cache_gb=0.01),
            drafters=(DrafterConfig(name="ngram", options=NgramOptions()),),
            planner=ALWAYS_DRAFTED,
            transport=TransportConfig(host="127.0.0.1"),
        )
        self._tls = tls
        config = resolve(base.model_copy(update={"cluster": base.cluster.model_copy(update={"tls": tls})}), NODES)
        self.target = TargetActor(config, "target-0", "grpc://127.0.0.1:0", TOKEN)
        stack.callback(self.target.stop)
        info = self.target.start()
        assert isinstance(info, TargetInfo)
        self.info = info
        self.drafter_with(tls, stack)

    def drafter_with(self, tls: TlsConfig | None, stack: ExitStack, name: str = "ngram") -> None:
        config = DrafterConfig(name=name, options=NgramOptions())
        drafter = DrafterActor(config, name, self.info.model, [self.info.address], TOKEN, tls=tls)
        stack.callback(drafter.stop)
        drafter.start()

    def followed(self) -> set[str]:
        """Drafters that are linked."""
        report = self.target.slot_report()
        assert report is not None
        return set(report.drafters)

    def tokens(self, tls: TlsConfig | None) -> list[int] | None:
        """The answer to a gateway with these files; None: it gets no link."""

        async def answer() -> list[int] | None:
            client = LinkClient("gateway", self.info.model, [self.info.address], _no_status, TOKEN, tls=tls)
            try:
                if not await asyncio.to_thread(client.wait_linked, DEADLINE_S if tls == self._tls else 1.0):
                    return None
                request = a_request("r", (5, 6, 7, 5, 6, 7, 5), sampling=SAMPLING)
                return [token async for commit in client.generate(request) for token in commit.token_ids]
            finally:
                await client.close()

        return asyncio.run(answer())


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return authority.issue(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def served(tiny_model_folder: Path, files: TlsConfig, stack: ExitStack) -> Served:
    return Served(tiny_model_folder, files, stack)


def test_the_tokens_are_those_without_tls(
    served: Served, files: TlsConfig, tiny_model_folder: Path, stack: ExitStack
) -> None:
    plain = Served(tiny_model_folder, None, stack)
    for one in (served, plain):
        eventually(lambda one=one: one.followed() == {"ngram"}, DEADLINE_S)  # type: ignore[misc]
    tokens = served.tokens(files)
    assert tokens is not None
    assert len(tokens) == SAMPLING.max_tokens
    assert plain.tokens(None) == tokens
    (counts,) = served.target.report().drafters
    assert counts.num_proposed > 0


def test_processes_that_know_the_secret_alone_get_no_link(
    served: Served, files: TlsConfig, authority: Authority, tmp_path: Path, stack: ExitStack
) -> None:
    theirs = Authority("another").issue(tmp_path / "theirs")
    assert served.tokens(None) is None
    assert served.tokens(theirs) is None
    served.drafter_with(theirs, stack, "stranger")
    served.drafter_with(authority.issue(tmp_path / "ours"), stack, "friend")
    eventually(lambda: "friend" in served.followed(), DEADLINE_S)
    assert "stranger" not in served.followed()
    assert served.tokens(files) is not None
