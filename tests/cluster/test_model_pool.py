"""Two model drafters on a real server whose memory holds one of them: each is loaded when it is wanted, the other leaves."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.server import ServerProcess
from cluster.config import DrafterConfig, MemoryConfig, ModelOptions
from drafters.footprint import footprint
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.nightly]

MODEL = "smollm2-135m"
PROMPT = "The lighthouse keeper wrote the same line every day: the sea is calm and the lamp is lit. The lighthouse keeper"


@pytest.fixture(scope="module")
def crowded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    three, six = (
        DrafterConfig(
            name=name,
            options=ModelOptions(model=str(model_folder), num_layers=num_layers, dtype="float32", kv_cache_gb=0.05),
            capacity=8,
            load="lazy",
        )
        for name, num_layers in (("three", 3), ("six", 6))
    )
    lookup = config.drafters[0].model_copy(update={"capacity": 8})
    taken = {drafter.name: footprint(drafter, "cpu", config.model.max_model_len).total for drafter in (lookup, three, six)}
    assert taken["three"] < taken["six"]
    room = taken["ngram"] + taken["six"] + taken["three"] // 2
    memory = MemoryConfig(cpu_gb=room / 2**30, min_residence_s=0.5)
    drafters = (lookup, three, six)
    changes = {"drafters": drafters, "memory": memory, "planner": ALWAYS_DRAFTED}
    with served(config.model_copy(update=changes)) as server:
        yield server


def complete(http: httpx.Client, drafting: str) -> str:
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 60,
        "temperature": 0.7,
        "seed": 3,
        "ignore_eos": True,
        "drafting": drafting,
    }
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_drafters_that_do_not_fit_at_once_take_turns_and_change_no_token(crowded: ServerProcess) -> None:
    with crowded.client() as http:

        def states() -> dict[str, str]:
            return dict(http.get("/health").json()["drafters"])

        eventually(lambda: states() == {"ngram": "ready", "three": "unloaded", "six": "unloaded"})
        plain = complete(http, "off")
        assert len(crowded.workers("DrafterActor")) == 1

        def drafted(name: str) -> bool:
            """Whether it has proposed something, after one answer more. Few layers are so seldom right that none of it need
            have been verified."""
            assert complete(http, name) == plain
            return states()[name] == "ready" and gauge(http, "outrider_drafter_reply_seconds", name) > 0

        for name, other in (("three", "six"), ("six", "three"), ("three", "six")):
            eventually(lambda name=name: drafted(name))  # type: ignore[misc]
            assert states() == {"ngram": "ready", name: "ready", other: "unloaded"}
            assert gauge(http, "outrider_drafter_memory_bytes", name) > 0
            assert gauge(http, "outrider_drafter_memory_bytes", other) == 0
            assert len(crowded.workers("DrafterActor")) == 2
        # A slow load may be given up and asked for again, so more than once each; but every other one has left.
        loads, evictions = (
            {name: gauge(http, f"outrider_drafter_{what}_total", name) for name in ("three", "six")}
            for what in ("loads", "evictions")
        )
        assert loads["three"] >= 2
        assert loads["three"] == evictions["three"] + 1
        assert loads["six"] == evictions["six"] >= 1


def test_a_named_chain_that_is_not_configured_is_refused(crowded: ServerProcess) -> None:
    with crowded.client() as http:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "drafting": "three>six"}
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "it verifies no other drafter" in answer.json()["error"]["message"]
