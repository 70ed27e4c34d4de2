"""schemathesis over the API, from the environment of tests/clients."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.api import MODEL, app_of, listening, model_info, saying
from tests.support.scripted import ScriptedClient

VARIABLE = "OUTRIDER_CLIENTS"  # as in tests/cluster/test_clients.py
CLIENTS = Path(__file__).parents[1] / "clients"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_case_of_schemathesis_breaks_the_server() -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip("make test-clients runs it")
    cluster = ScriptedClient(model_info(), saying("the answer"), drafters=("ngram",))
    with listening(app_of(cluster)) as url:
        outcome = subprocess.run(
            [
                Path(folder) / "bin" / "python",
                "-m",
                "pytest",
                "-q",
                "-c",
                CLIENTS / "pytest.ini",
                CLIENTS / "test_schemathesis.py",
            ],
            env={
                **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")},
                "OUTRIDER_FUZZED_URL": url,
                "OUTRIDER_MODEL": MODEL,
            },
            cwd=CLIENTS.parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
    assert outcome.returncode == 0, outcome.stdout[-8000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout
    assert cluster.num_open == 0
