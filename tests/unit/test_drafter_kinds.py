"""Where the product names the kinds of drafters that read hidden states."""

import ast
import re
from pathlib import Path

import pytest

from cluster.config import HIDDEN_STATE_FORMS

ROOT = Path(__file__).parents[2]
PRODUCT = ("cluster", "router", "profiler", "engine", "drafters", "training", "actors", "deploy")
VERIFICATION = {Path("cluster/config/rules.py"), Path("router/drafting/policies.py")}  # the policy `dspark` is no drafter


def strings(text: str) -> list[str]:
    """Of code, without docstrings."""
    tree = ast.parse(text)
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said
    ]


@pytest.mark.parametrize("kind", HIDDEN_STATE_FORMS)
def test_a_kind_is_named_in_at_most_four_files(kind: str) -> None:
    named = {
        path.relative_to(ROOT)
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*.py")
        if kind in (code := path.read_text()) and any(re.search(rf"\b{kind}\b", text) for text in strings(code))
    }
    assert Path("cluster/config/drafters.py") in named
    assert len(named - VERIFICATION) <= 4, sorted(map(str, named))
