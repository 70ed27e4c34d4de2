"""npm's ``openai`` and ``ai`` over a running server: each script of this folder asserts for itself.

See test_langchain.py for what this needs; besides, Node and the packages of package.json, next to this environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

URL = os.environ.get("OUTRIDER_URL")
PACKAGES = Path(sys.prefix) / "node_modules"

pytestmark = pytest.mark.skipif(URL is None, reason="OUTRIDER_URL names no server")


@pytest.mark.parametrize("script", ["openai.mjs", "ai.mjs"])
def test_what_a_script_asserts_holds(script: str) -> None:
    # An import of a module is looked for in the folders above its file.
    copy = shutil.copy(Path(__file__).parent / script, PACKAGES.parent)
    outcome = subprocess.run(["node", copy], capture_output=True, text=True, timeout=280, check=False)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
