"""`deploy/examples/dedicated-drafters.yaml` with CPUs for GPUs: drafters in processes of their own read hidden states."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server import ServerProcess
from cluster.config import HiddenStateOptions, ModelConfig, Resources, StateConfig, load
from deploy.local_ray import free_port
from deploy.status import PATH
from tests.support.dspark import write_speculators
from tests.support.examples import EXAMPLES
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

HIDDEN_SIZE, LAYERS = 576, {"eagle3": 2, "dspark": 3}  # of the target; that each drafter reads


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The shipped DSpark drafter, and an EAGLE-3 head with random weights."""
    config, folder = load(EXAMPLES / "dedicated-drafters.yaml"), tmp_path_factory.mktemp("dedicated")
    write_speculators(folder / "eagle3", model_folder, "eagle3")
    cpus, paths = Resources(cpus=0.3), {"eagle3": str(folder / "eagle3"), "dspark": "dspark"}
    drafters = tuple(
        one.model_copy(
            update={"options": HiddenStateOptions(kind=one.options.kind, path=paths[one.name]), "resources": cpus}
        )
        for one in config.drafters
    )
    on_cpus = {"device": "cpu", "tensor_parallel": 1, "dtype": "float32", "kv_cache_gb": 0.25, "resources": cpus}
    state = config.cluster.model_copy(update={"state": StateConfig(folder=folder / "state")})
    changes = {
        "model": ModelConfig(name=str(model_folder)),
        "target": config.target.model_copy(update=on_cpus),
        "drafters": drafters,
        "planner": ALWAYS_DRAFTED,
        "api": config.api.model_copy(update={"port": free_port()}),
        "cluster": state,
    }
    with served(config.model_copy(update=changes)) as server:
        yield server


def complete(http: httpx.Client, drafting: str, temperature: float) -> dict[str, Any]:
    prompt = (
        "The lighthouse keeper wrote the same line every day: the sea is calm and the lamp is lit. The lighthouse keeper"
    )
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 40, "seed": 3, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body | {"drafting": drafting, "temperature": temperature})
    assert answer.status_code == httpx.codes.OK, answer.text
    return dict(answer.json())


def test_drafters_on_resources_of_their_own_change_no_token_and_their_links_show(server: ServerProcess) -> None:
    with server.client() as http:
        eventually(lambda: gauge(http, "outrider_drafter_ready") == 2)
        assert len(server.workers("DrafterActor")) == 2
        for name in ("off", "eagle3", "dspark"):
            for temperature in (0.0, 0.8):
                answer, plain = complete(http, name, temperature), complete(http, "off", temperature)
                assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
        for one in http.get(PATH).json()["drafters"]:
            counts = one["counts"]
            assert counts["num_fed"] > 100
            assert counts["fed_bytes"] == counts["num_fed"] * LAYERS[one["name"]] * HIDDEN_SIZE * 4
            assert sum(counts["link_s"]["counts"]) > 20
            assert one["num_proposed"] > 20
        assert gauge(http, "outrider_drafter_accepted_total", "dspark") > 10
