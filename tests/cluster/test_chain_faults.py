"""Chains of several models on a real server: their scheduler, and the drafter that they end at, are killed under load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import (
    ChainPolicy,
    DrafterConfig,
    FixedPolicy,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    PlannerConfig,
    RouterConfig,
)
from deploy.bench.server import ServerProcess
from tests.support.settings import small_config
from tests.support.streaming import another_takes_over, run
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]


@pytest.fixture(scope="module")
def chained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A lookup, and a third of the target's layers; the scheduler decides which of them, in which chain."""
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    third = ModelOptions(model=str(model_folder), num_layers=10, dtype="float32", kv_cache_gb=0.1)
    drafters = (config.drafters[0], DrafterConfig(name="third", options=third, capacity=8))
    router = RouterConfig(policy=ChainPolicy(), slot_ms=100)
    with ServerProcess(config.model_copy(update={"drafters": drafters, "router": router})) as server:
        yield server


def test_a_killed_chain_scheduler_changes_no_token_and_another_takes_over(chained: ServerProcess) -> None:
    another_takes_over(chained, "ModelChainScheduler")


def test_killed_drafters_of_chains_change_no_token_and_come_back(chained: ServerProcess) -> None:
    plain = run(chained, kill=None)
    with chained.client() as http:
        disturbed = run(chained, kill="DrafterActor")
        assert (disturbed.texts, disturbed.errors) == (plain.texts, {})
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)


def test_three_levels_serve_the_targets_own_tokens(model_folder: Path, tmp_path: Path) -> None:
    """How many drafts come in time is the machine's affair (`tests/unit/test_led.py` waits for them). On a busy one all of
    the first may come so late that it is not known how long they take: then there is more to draft for until it is."""
    config = small_config(str(model_folder), tmp_path)
    few = LayersOptions(path="layers-2", target=str(model_folder), min_survival=0.5, kv_cache_gb=0.1)
    trained = few.model_copy(update={"min_survival": 0.0})
    pool = {"ngram": NgramOptions(), "few": few, "trained": trained}
    drafters = tuple(DrafterConfig(name=name, options=options, max_draft_len=3) for name, options in pool.items())

    def texts(*chain: str) -> dict[int, str]:
        router = RouterConfig(policy=FixedPolicy(chain=chain), slot_ms=100)
        changes = {"drafters": drafters, "router": router, "planner": PlannerConfig(verify="all")}
        with ServerProcess(config.model_copy(update=changes)) as server:
            streamed = run(server, kill=None, max_tokens=120)
            assert not streamed.errors
            with server.client() as http:

                def has_drafted() -> bool:
                    if gauge(http, "outrider_drafter_reply_seconds", chain[-1]) > 0:
                        return True
                    assert not run(server, kill=None, max_tokens=40).errors
                    return False

                if chain:
                    eventually(has_drafted)
            return streamed.texts

    assert texts("ngram", "few", "trained") == texts()
