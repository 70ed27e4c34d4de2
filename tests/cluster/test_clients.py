"""Other people's clients against a real server, each suite in an environment of its own: see tests/clients."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.model]

VARIABLE = "OUTRIDER_CLIENTS"  # a virtual environment with the packages of tests/clients/requirements.txt
CLIENTS = Path(__file__).parents[1] / "clients"


@pytest.mark.timeout(900)
def test_other_people_s_clients(server: ServerProcess, model_folder: Path) -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip("make test-clients runs it")
    outcome = subprocess.run(
        [Path(folder) / "bin" / "python", "-m", "pytest", "-q", "-c", CLIENTS / "pytest.ini", CLIENTS],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")},
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
