"""Chains of several models on a real server: their scheduler, and the drafter that they end at, are killed under load."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from cluster.config import DrafterConfig, ModelOptions, PolicyConfig, RouterConfig
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.streaming import another_takes_over, run, undrafted
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

Texts = Mapping[int, str]


@pytest.fixture(scope="module")
def chained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A lookup, four of the target's layers, and ten of them; the scheduler decides which of them, in which chain."""
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    few = ModelOptions(model=str(model_folder), num_layers=4, dtype="float32", kv_cache_gb=0.1)
    third = ModelOptions(model=str(model_folder), num_layers=10, dtype="float32", kv_cache_gb=0.1)
    drafters = (
        config.drafters[0],
        DrafterConfig(name="few", options=few, max_draft_len=3),
        DrafterConfig(name="third", options=third, capacity=8),
    )
    changes = {"drafters": drafters, "router": RouterConfig(policy=PolicyConfig(kind="chain")), "planner": ALWAYS_DRAFTED}
    with served(config.model_copy(update=changes)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(chained: ServerProcess) -> Texts:
    return undrafted(chained)


def test_a_chain_of_three_drafters_serves_the_targets_own_tokens(chained: ServerProcess, plain: Texts) -> None:
    """How many drafts come in time is the machine's affair (`tests/unit/test_chained.py` waits for them). On a busy one all
    of the first may come so late that it is not known how long they take: then there is more to draft for until it is."""
    with chained.client() as http:
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 3)

        def has_drafted() -> bool:
            streamed = run(chained, drafting="ngram>few>third")
            assert (streamed.texts, streamed.errors) == (plain, {})
            return gauge(http, "outrider_drafter_reply_seconds", "third") > 0

        eventually(has_drafted)


def test_a_killed_chain_scheduler_changes_no_token_and_another_takes_over(chained: ServerProcess, plain: Texts) -> None:
    another_takes_over(chained, "ModelChainScheduler", plain)


def test_killed_drafters_of_chains_change_no_token_and_come_back(chained: ServerProcess, plain: Texts) -> None:
    with chained.client() as http:
        disturbed = run(chained, kill="DrafterActor")
        assert (disturbed.texts, disturbed.errors) == (plain, {})
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 3)
