"""Other people's clients against a real server, each suite in an environment of its own: see tests/clients."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from tests.support.coding_agents import VARIABLE, CodingAgents, git_repository, program
from tests.support.servers import served
from tests.support.settings import small_config

SKIPPED = pytest.mark.skipif(not os.environ.get(VARIABLE), reason="make test-clients runs it")  # and starts no server

pytestmark = [pytest.mark.ray, pytest.mark.model, SKIPPED]

CLIENTS = Path(__file__).parents[1] / "clients"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
MAX_MODEL_LEN = 16384  # what opencode and Codex CLI need


@pytest.mark.timeout(1500)
def test_other_people_s_clients(server: ServerProcess, model_folder: Path) -> None:
    folder = os.environ[VARIABLE]
    outcome = subprocess.run(
        [Path(folder) / "bin" / "python", "-m", "pytest", "-q", "-c", CLIENTS / "pytest.ini", CLIENTS],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")},
            **OFFLINE,
            "OUTRIDER_URL": server.url,
            "OUTRIDER_TOKENIZER": str(model_folder),
        },
        cwd=CLIENTS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    print(outcome.stdout)
    assert outcome.returncode == 0, outcome.stdout[-8000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout


@pytest.fixture(scope="module")
def long_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of the same model with twice as many positions. Its answers are meaningless: every fourth token ends one."""
    folder = tmp_path_factory.mktemp("long") / "smollm2-135m"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    rope = {"rope_theta": 100000.0, "rope_type": "linear", "factor": 2.0}
    change(folder / "config.json", max_position_embeddings=MAX_MODEL_LEN, rope_parameters=rope)
    change(folder / "generation_config.json", max_new_tokens=64, eos_token_id=list(range(2, 49152, 4)))
    config = small_config(str(folder), tmp_path_factory.mktemp("state"))
    model = config.model.model_copy(update={"max_model_len": MAX_MODEL_LEN})
    target = config.target.model_copy(update={"dtype": "auto", "kv_cache_gb": 1.0})
    with served(config.model_copy(update={"model": model, "target": target})) as server:
        yield server


def change(file: Path, **fields: object) -> None:
    """Writes a file in place of the link to the model's."""
    document = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**document, **fields}))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["codex", "opencode", "aider"])
def test_coding_agents_converse(name: str, long_server: ServerProcess, tmp_path: Path) -> None:
    """Two turns over a model too small to call tools: tests/unit/test_coding_agents.py has those, over a scripted one."""
    program(name)
    git_repository(tmp_path / "repository", **{"greeting.txt": "hello\n"})
    agent = CodingAgents(tmp_path / "repository", long_server.url, "smollm2-135m", MAX_MODEL_LEN)
    for words in ("Say hello.", "Say it again."):
        if name == "aider":
            assert "Tokens:" in agent.aider(words, "greeting.txt")
        else:
            getattr(agent, name)(words)  # fails where it ends with an error; an answer may be empty
