"""Other people's clients against a real server, each suite in an environment of its own: see tests/clients."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from tests.support.coding_agents import VARIABLE

SKIPPED = pytest.mark.skipif(not os.environ.get(VARIABLE), reason="make test-clients runs it")  # and starts no server

pytestmark = [pytest.mark.ray, pytest.mark.model, SKIPPED]

CLIENTS = Path(__file__).parents[1] / "clients"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


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
