"""The variables that are set before vLLM is imported."""

import os

import pytest

from engine.vllm import environment


def test_what_the_engine_depends_on_is_set_and_the_rest_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "require_vllm", lambda: None)
    monkeypatch.setattr(os, "environ", {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_LOGGING_LEVEL": "INFO"})
    environment.prepare_environment()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
