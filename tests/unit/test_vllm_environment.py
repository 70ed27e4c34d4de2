"""The variables that are set before vLLM is imported."""

import os

import pytest

from engine.vllm import environment


def test_what_the_engine_depends_on_is_set_and_the_rest_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "require_vllm", lambda: None)
    users = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    monkeypatch.setattr(os, "environ", users.copy())
    environment.prepare_environment()
    assert {name: os.environ[name] for name in users} == users | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
