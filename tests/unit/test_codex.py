"""Codex CLI over the API and a scripted model: two turns, each with a shell command."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.types import Commit, Request
from deploy.api.app import create_app
from deploy.api.chat_template import ChatTemplate
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from tests.support.api import CHAT_TEMPLATE, fast_tokenizer, finishing, listening, model_info, token_ids
from tests.support.scripted import ScriptedClient

VARIABLE = "OUTRIDER_CODEX"  # the program `codex` of npm's @openai/codex
PROVIDER = 'model_providers.outrider={{name="outrider", base_url="{url}/v1", wire_api="responses"}}'

pytestmark = pytest.mark.skipif(not os.environ.get(VARIABLE), reason="make test-clients runs it")


def text_of(request: Request) -> str:
    return fast_tokenizer().decode(list(request.prompt_token_ids), skip_special_tokens=False)


def agent(request: Request) -> Iterator[Commit]:
    """Calls the shell, and ends the turn once its result is there."""
    last_turn = text_of(request).removesuffix("<|start|>assistant\n").rpartition("<|start|>user\n")[2]
    call = {"name": "exec_command", "arguments": {"cmd": "echo from-the-$((40 + 2))-shell"}}
    answer = "all done" if last_turn.startswith("<tool_response>") else f"<tool_call>{json.dumps(call)}</tool_call>"
    yield from finishing(request, token_ids(answer))


def test_codex_runs_commands_in_two_turns(tmp_path: Path) -> None:
    cluster = ScriptedClient(replace(model_info(), max_model_len=2**18), agent)
    app = create_app(cluster, Tokenizer(fast_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {})), ApiSettings())
    (tmp_path / "home").mkdir()
    with listening(app) as url:
        for words in (["say hi"], ["resume", "--last", "and again"]):
            options = ["-c", PROVIDER.format(url=url), "-c", "model_provider=outrider", "-c", f"model={model_info().name}"]
            home = {"HOME": str(tmp_path / "home"), "CODEX_HOME": str(tmp_path / "home")}
            outcome = subprocess.run(
                [os.environ[VARIABLE], "exec", "--skip-git-repo-check", *options, *words],
                cwd=tmp_path,
                env={"PATH": os.environ["PATH"], **home},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert outcome.returncode == 0, outcome.stderr[-4000:]
            assert outcome.stdout.strip() == "all done"
    assert len(cluster.requests) == 4
    assert [text_of(request).count("\nfrom-the-42-shell\n") for request in cluster.requests] == [0, 1, 1, 2]
