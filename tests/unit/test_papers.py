"""docs/papers.md names each policy of a paper, and what it says to set is a configuration."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import Config, load, with_fields
from router.drafting.policies import DRAFT_LENGTHS, OVERLAP_POLICIES, VERIFICATION_POLICIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SETTINGS = [yaml.safe_load(code) for code in re.findall(r"`((?:router|planner|target): \{[^`]+\})`", PAGE)]
EXAMPLES = sorted((ROOT / "deploy" / "examples" / "papers").glob("*.yaml"))
OURS = {"outrider", "fixed", "threshold", "all", "gain", "barrier"}


def test_each_module_of_a_paper_is_named() -> None:
    modules = {path.name for path in (ROOT / "router" / "papers").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"`router/papers/{name}`" not in PAGE} == set()


def test_each_policy_of_a_paper_is_set_somewhere() -> None:
    named = set(re.findall(r"[\w-]+", " ".join(map(str, SETTINGS))))
    known = {*DRAFT_LENGTHS, *VERIFICATION_POLICIES, *OVERLAP_POLICIES} - OURS
    assert known <= named


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_it_says_to_set_is_a_configuration(setting: dict[str, Any]) -> None:
    assert with_fields(Config(), setting) != Config() or "epsilon-greedy" in str(setting) or "auto" in str(setting)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_a_configuration_that_the_page_explains(path: Path) -> None:
    config = load(path)
    assert config.drafters
    assert path.stem.lower() in PAGE.lower()
    assert config.planner != Config().planner or config.router != Config().router
