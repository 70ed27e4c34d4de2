"""The file of each paper starts a server, whose tokens are those of plain decoding, and whose status names the policies."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cluster.config import ApiConfig, StateConfig, load
from deploy.local_ray import free_port
from deploy.status import fetch
from tests.support.examples import EXAMPLES
from tests.support.servers import served

pytestmark = [pytest.mark.ray, pytest.mark.model]

PAPERS = {  # router's policy, and the planner's
    "spin": ("lbss", ("length fixed", "verify all", "overlap micro-batch", "partition auto")),
    "dspark": ("fixed", ("length outrider", "verify dspark-async", "overlap gain", "partition auto")),
    "adaspec": ("fixed", ("length adaspec", "verify adaspec", "overlap barrier", "partition auto")),
    "specrouter": ("chain", ("length outrider", "verify outrider", "overlap gain", "partition auto")),
    "faser": (
        "epsilon-greedy",
        ("length faser", "verify outrider", "overlap frontier", "early exit auto", "partition auto"),
    ),
}
EACH_COMMIT = ("spin", "dspark")
PROMPTS = [f"Count from {i} to {i + 9}: {', '.join(map(str, range(i, i + 4)))}, " for i in range(0, 100, 5)]
NUM_TOKENS, NUM_STREAMS = 32, 5


@pytest.mark.parametrize(
    "paper", [name if name in EACH_COMMIT else pytest.param(name, marks=pytest.mark.nightly) for name in PAPERS]
)
def test_a_papers_file_serves_the_targets_tokens(paper: str, model_folder: Path, tmp_path: Path) -> None:
    config = load(EXAMPLES / "papers" / f"{paper}.yaml")
    where = {
        "api": ApiConfig(port=free_port()),
        "cluster": config.cluster.model_copy(update={"state": StateConfig(folder=tmp_path / "state")}),
        "target": config.target.model_copy(update={"dtype": "float32"}),  # in bfloat16 a near tie may fall the other way
    }
    with served(config.model_copy(update=where)) as server, server.client() as client:
        plain, drafted = answers(client, config.model.name, "off"), answers(client, config.model.name, "auto")
        status = fetch(client)
    assert drafted == plain
    assert (status.policy, status.planned_by) == PAPERS[paper]
    assert sum(drafter.num_accepted for drafter in status.drafters) > 0


def answers(client: httpx.Client, model: str, drafting: str) -> list[str]:
    def ask(prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "drafting": drafting}
        answer = client.post("/v1/completions", json=body | {"cache_salt": drafting})
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(NUM_STREAMS) as streams:
        return list(streams.map(ask, PROMPTS))
