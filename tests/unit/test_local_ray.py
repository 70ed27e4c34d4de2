"""What a Ray cluster of this machine is started with."""

import os
import stat
from pathlib import Path

import pytest

from deploy.local_ray import prepare_environment


def test_ray_asks_for_a_token_that_only_this_user_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_environment(tmp_path)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
