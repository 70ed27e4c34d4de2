"""Coding agents of other projects as child processes, which know no other server than ours: Codex CLI, opencode and aider.

``make test-clients`` installs them. Each has a home folder of its own; telemetry and looking for updates are off."""

import json
import os
import subprocess
from pathlib import Path

import pytest

VARIABLE = "OUTRIDER_CLIENTS"  # the folder of tests/clients' packages: an environment of Python, aider/ and node_modules/
END_S = 280
PROGRAMS = {"codex": "node_modules/.bin/codex", "opencode": "node_modules/.bin/opencode", "aider": "aider/bin/aider"}
CODEX_PROVIDER = 'model_providers.outrider={{name="outrider", base_url="{url}/v1", wire_api="responses"}}'
KEY = "unused"


class CodingAgents:
    """Runs agents in ``folder``, where each call goes on with the conversation of the last one."""

    def __init__(self, folder: Path, url: str, model: str, max_model_len: int) -> None:
        self.folder = folder
        self._url = url
        self._model = model
        self._max_model_len = max_model_len
        self._home = folder.parent / f"{folder.name}-home"
        self._home.mkdir()
        self._num_calls = 0

    def codex(self, words: str) -> str:
        settings = [CODEX_PROVIDER.format(url=self._url), "model_provider=outrider", f"model={self._model}"]
        options = [word for setting in settings for word in ("-c", setting)]
        again = ["resume", "--last"] if self._goes_on() else []
        return self._run("codex", "exec", "--skip-git-repo-check", *options, *again, words)

    def opencode(self, words: str) -> str:
        model = {"name": self._model, "limit": {"context": self._max_model_len, "output": 512}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{self._url}/v1", "apiKey": KEY},
            "models": {self._model: model},
        }
        settings = {"provider": {"outrider": provider}, "share": "disabled", "autoupdate": False}
        (self.folder / "opencode.json").write_text(json.dumps(settings))
        again = ["--continue"] if self._goes_on() else []
        return self._run("opencode", "run", "--model", f"outrider/{self._model}", *again, words)

    def aider(self, words: str, file: str) -> str:
        options = ["--yes-always", "--analytics-disable", "--no-check-update", "--no-show-release-notes", "--no-stream"]
        limits = {"max_input_tokens": self._max_model_len, "max_output_tokens": 512, "litellm_provider": "openai"}
        metadata = self._home / "models.json"
        metadata.write_text(json.dumps({f"openai/{self._model}": {**limits, "mode": "chat"}}))
        options += [
            "--no-show-model-warnings",
            "--model-metadata-file",
            str(metadata),
            "--edit-format",
            "whole",
            "--map-tokens",
            "0",
        ]
        server = ["--openai-api-base", f"{self._url}/v1", "--openai-api-key", KEY, "--model", f"openai/{self._model}"]
        return self._run("aider", *options, *server, "--message", words, file)

    def _goes_on(self) -> bool:
        self._num_calls += 1
        return self._num_calls > 1

    def _run(self, name: str, *words: str) -> str:
        """Its output; fails where it does not end well."""
        outcome = subprocess.run(
            [program(name), *words],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )
        assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-4000:]
        return outcome.stdout

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "CODEX_HOME": str(self._home),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


def program(name: str) -> Path:
    """Of an agent. Skips where ``make test-clients`` has not installed it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip("make test-clients runs it")
    return Path(folder) / PROGRAMS[name]


def git_repository(folder: Path, **files: str) -> None:
    """One commit of files."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    me = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "--quiet"], ["add", "."], [*me, "commit", "--quiet", "-m", "Begin"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
