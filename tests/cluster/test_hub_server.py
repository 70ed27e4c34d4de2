"""`outrider serve ORG/MODEL` with the flags of `vllm serve`: from a hub, and again without it."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.server import ServerProcess
from cluster.config import ApiConfig, Config
from deploy.local_ray import free_port
from tests.support.hub import running_hub
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.ray

NAME = "test/Tiny-Qwen3"
NGRAM = '{"method":"ngram","prompt_lookup_max":4,"num_speculative_tokens":8}'
HEAD_DIM, NUM_LAYERS = 8, 2


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32, where tokens do not depend on drafts."""
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": HEAD_DIM}
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    write_tiny_model(folder, num_layers=NUM_LAYERS, max_position_embeddings=8192, **kind)
    file = folder / "model.safetensors"
    norms = {
        f"model.layers.{layer}.self_attn.{which}_norm.weight": torch.ones(HEAD_DIM)
        for layer in range(NUM_LAYERS)
        for which in "qk"
    }
    save_file({**load_file(file), **norms}, file, metadata={"format": "pt"})
    return folder


def server(environment: dict[str, str], folder: Path) -> ServerProcess:
    config = Config(api=ApiConfig(port=free_port()))
    words = [NAME, "--tensor-parallel-size", "1", "--max-model-len", "4096", "--speculative-config", NGRAM]
    here = ["--port", str(config.api.port), "--set", f"cluster.state={{folder: {folder}}}"]
    return ServerProcess(config, {**os.environ, **environment}, words=[*words, *here, "--dtype", "float32"])


def answer(server: ServerProcess) -> str:
    with server.client() as http:
        (model,) = http.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == (NAME, 4096)
        body = {"model": NAME, "prompt": "one two one two one two", "max_tokens": 64, "temperature": 0}
        answered = http.post("/v1/completions", json=body).json()
        drafters = [drafter["name"] for drafter in http.get("/v1/outrider/status").json()["drafters"]]
    assert (answered["model"], drafters) == (NAME, ["ngram"])
    return json.dumps(answered["choices"])


def test_a_model_of_the_hub_is_served_and_again_without_it(published: Path, tmp_path: Path) -> None:
    with running_hub({NAME: published}) as hub:
        environment = hub.environment(tmp_path / "cache")
        with server(environment, tmp_path / "state") as first:
            told = answer(first)
        asked = hub.asked.total()
        assert hub.asked["file"] > 0
        with server({**environment, "HF_HUB_OFFLINE": "1"}, tmp_path / "state") as second:
            assert answer(second) == told
        assert hub.asked.total() == asked
