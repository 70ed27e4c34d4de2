"""No process of a served cluster writes a prompt or an answer to any log, at level DEBUG."""

import os
from pathlib import Path

import pytest

from benchmarks.server import ServerProcess
from cluster.config import ObservabilityConfig
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED, API_KEY, small_config
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model]

CANARY = "zanzibarcanary"
PROMPT = f"The secret word is {CANARY}. Repeat the secret word {CANARY} ten times: {CANARY} {CANARY}"
# Run by every Python process at its start. Its lines are the control: what a process logs at DEBUG is found in its file.
SITE = """
import logging, os, sys, threading

def repeat():
    while not stop.wait(0.5):
        logging.getLogger("control").debug("control of %d.", os.getpid())

logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s", stream=sys.stderr)
stop = threading.Event()
threading.Thread(target=repeat, daemon=True).start()
"""


def _logs(server: ServerProcess) -> dict[str, str]:
    """Every file of the cluster's session but its binary ones, and the server's own output."""
    files = {Path(file.path) for process in server.workers("ServeReplica") for file in process.open_files()}
    (folder,) = {file.parent for file in files if file.parent.name == "logs"}
    texts = {str(file): file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file()}
    return texts | {"the server's output": server.last_words(1_000_000)}


def test_no_log_holds_a_prompt_or_an_answer(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "keys").write_text(f"{API_KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    config = small_config(str(model_folder), tmp_path / "state")
    api = config.api.model_copy(update={"api_keys_file": tmp_path / "keys"})
    observability = ObservabilityConfig(log_format="json", audit_log_file=tmp_path / "audit")
    config = config.model_copy(update={"planner": ALWAYS_DRAFTED, "api": api, "observability": observability})
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with served(config, os.environ | {"PYTHONPATH": path}) as server, server.client() as client:
        client.headers["authorization"] = f"Bearer {API_KEY}"
        eventually(lambda: gauge(client, "outrider_drafter_ready") == 2)
        token_ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        assert len(token_ids) > 8
        (model,) = (one["id"] for one in client.get("/v1/models").json()["data"])
        body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
        client.post("/v1/completions", json=body | {"temperature": PROMPT})
        client.post("/v1/completions", content=f'{{"model": "{model}", "prompt": "{PROMPT}')
        with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 1000}) as stream:
            next(stream.iter_text())  # and the client leaves
        workers = [
            worker.pid for actor in ("ServeReplica", "TargetActor", "DrafterActor") for worker in server.workers(actor)
        ]
        assert len(workers) >= 4
        logs = _logs(server)
    logs["audit"] = (tmp_path / "audit").read_text()
    assert CANARY in answer["choices"][0]["text"], "the answer quotes the prompt"
    for pid in workers:
        assert any(f"control of {pid}." in text for name, text in logs.items() if name.endswith(f"-{pid}.err"))
    assert '"prompt_tokens"' in logs["audit"]
    few = token_ids[2:8]
    for secret in (CANARY, ", ".join(map(str, few)), " ".join(map(str, few)), ",".join(map(str, few)), API_KEY):
        assert not [name for name, text in logs.items() if secret in text], secret
