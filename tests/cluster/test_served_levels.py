"""The server as `make serve` starts it, below the machine's own CPU level and without a compiler."""

from pathlib import Path

import pytest

from cluster.config import ApiConfig, ClusterConfig, Config, ModelConfig, StateConfig
from deploy.local_ray import free_port
from engine.cpu_level import cpu_level, machine_level
from tests.support.cpu_levels import LOWER_LEVELS, NO_COMPILER, environment_of
from tests.support.servers import served

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.nightly]

CASES = {level: environment_of(level) for level in LOWER_LEVELS if level in ("generic", "avx2")}
CASES["no compiler"] = environment_of("auto") | NO_COMPILER


@pytest.mark.parametrize("case", CASES)
def test_the_server_answers_as_its_plain_target_does(case: str, model_folder: Path, tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(name=str(model_folder)),
        api=ApiConfig(port=free_port()),
        cluster=ClusterConfig(state=StateConfig(folder=tmp_path / "state")),
    )
    with served(config, CASES[case]) as server, server.client() as client:
        (model,) = (one["id"] for one in client.get("/v1/models").json()["data"])
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
        drafted, plain = (
            client.post("/v1/completions", json=body | {"drafting": drafting}).json() for drafting in ("auto", "off")
        )
        said = server.last_words(100)
    texts = [answer["choices"][0]["text"] for answer in (drafted, plain)]
    assert all("Paris" in text for text in texts)
    if case == "no compiler" and not cpu_level().has_bf16_products:  # in bfloat16 a near-tie may fall the other way
        assert texts[0] == texts[1]
    level = f"{case}, lowered from {machine_level()} by OUTRIDER_CPU" if case in LOWER_LEVELS else machine_level()
    assert f"CPU level {level}" in said
    assert ("CPU kernels are not available" in said) is (case == "no compiler")
