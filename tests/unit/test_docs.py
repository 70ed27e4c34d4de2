"""README, CONTRIBUTING and docs name only files, modules, settings, metrics, commands and targets of make that exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from benchmarks import BENCHES
from benchmarks.simulate import names as scenario_names
from cluster.config import Config
from cluster.config.rules import Rule
from deploy.cli import app
from deploy.vllm_flags import FLAGS, NEEDLESS, SPECIAL
from tests.support.metrics import exported

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = sorted(folder.parent.name for folder in ROOT.glob("*/__init__.py"))

SOURCE = r"(?:py|pyi|c|h|md|proto|toml)"
PATH = re.compile(rf"(?<![\w/~$<>-])((?:[\w.-]+/)+[\w*.-]+\.{SOURCE})\b")  # with a folder, anywhere in the text
BARE = re.compile(rf"`([\w*]+\.{SOURCE})`")  # without one: some file has this name
FOLDER = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs|assets|k8s|\.ci)/[\w/.-]*)`")
FILE = rf"(?:{SOURCE}|safetensors|json|yaml|npz)"
DOTTED = re.compile(rf"`([a-z_]+(?:\.(?!{FILE}`)[A-Za-z_]\w*)+)`")
DEFINED = re.compile(rf"((?:`\w+`(?:, | and ))*`\w+`)\s(?:in |of |\()`((?:\w+/)+\w+\.{SOURCE})`")  # `Name` in `path`
LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([\w-]+))?\)")
METRIC = re.compile(r"\boutrider_\w+")
SPAN = re.compile(r"`([^`\n]+)`")
METRICS = exported() | {name.removesuffix("_bucket") for name in exported()}  # pages name histograms without a suffix
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(\.\w+)?")


def wrong_names(text: str, folder: Path = ROOT) -> list[str]:
    """What a page in ``folder`` names and does not exist. In the pages of measurements, dotted names and names that begin as
    metrics do are figures."""
    wrong = [path for path in {*PATH.findall(text), *FOLDER.findall(text)} if not _exists(path, folder)]
    wrong += [f"{name} in {path}" for names, path in DEFINED.findall(text) for name in _undefined(names, path)]
    wrong += [name for name in BARE.findall(text) if not any(_tracked(name))]
    if folder.name != "measurements":
        wrong += [name for name in DOTTED.findall(text) if not _is_dotted_name(name)]
        wrong += sorted(set(METRIC.findall(text)) - METRICS)
    wrong += [f"({path}#{anchor})" for path, anchor in LINK.findall(text) if not _is_link(path, anchor, text, folder)]
    wrong += [f"{line}: {reason}" for line in _commands(text) if (reason := _wrong_in(line)) is not None]
    return wrong


def _exists(path: str, folder: Path) -> bool:
    if PLACEHOLDER.fullmatch(Path(path).name):
        path = str(Path(path).parent)
    return any(True for base in (ROOT, folder) for _ in base.glob(path)) or (folder / path).exists()


def _undefined(names: str, path: str) -> list[str]:
    """Those of ``names`` that the file does not hold."""
    text = (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else ""
    return [name for name in re.findall(r"`(\w+)`", names) if not re.search(rf"\b{name}\b", text)]


def _tracked(name: str) -> Iterator[Path]:
    for top in (*PACKAGES, "tests", "docs"):
        yield from (ROOT / top).rglob(name)
    yield from ROOT.glob(name)


def _is_dotted_name(name: str) -> bool:
    """A setting, or a module with perhaps a name in it. Names that begin with neither are somebody else's."""
    first, *rest = name.split(".")
    if first not in PACKAGES and first not in Config.model_fields:
        return True
    return _is_setting(Config, [first, *rest]) or _is_in_module(ROOT / first, rest)


def _is_setting(section: Any, keys: list[str]) -> bool:
    for key in keys:
        models = [model for model in _models(section) if key in model.model_fields]
        if not models:
            return any(
                key in known for model in _models(section) if issubclass(model, Rule) for known in model.table.values()
            )
        section = models[0].model_fields[key].annotation
    return True


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Those that a value of this type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


def _is_in_module(path: Path, names: list[str]) -> bool:
    while names and ((path / names[0]).is_dir() or (path / f"{names[0]}.py").is_file()):
        path, names = path / names[0], names[1:]
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not module.is_file():
        return False
    return not names or re.search(rf"\b{names[0]}\b", module.read_text("utf-8")) is not None


def _is_link(path: str, anchor: str, text: str, folder: Path) -> bool:
    page = folder / path
    if path and not page.exists():
        return False
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8") if path and anchor else text, re.MULTILINE)
    return not anchor or anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def _commands(text: str) -> Iterator[str]:
    """Commands in code blocks and in code spans."""
    joined = re.sub(r"\\\n\s*", "", text)
    blocks = re.findall(r"^ {4,}(\S.*)$", joined, re.MULTILINE)
    for fenced in re.findall(r"^```\w*\n(.*?)^```", joined, re.MULTILINE | re.DOTALL):
        blocks += fenced.splitlines()
    for line in (*blocks, *SPAN.findall(joined)):
        line = re.sub(r"^(\w+=\S+ )+", "", line.strip())
        if line.startswith(("outrider ", "make ")):
            yield line


def _wrong_in(line: str) -> str | None:
    """Why the program does not know this command."""
    words = [word.strip("[]") for word in shlex.split(line, comments=True)]
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no target {unknown[0]}" if unknown else None
    command: Any = typer.main.get_command(app)
    words.pop(0)
    while words and hasattr(command, "commands"):
        if words[0].startswith("-") or not words[0]:
            break
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    if command.name in ("serve", "config"):
        options |= {*FLAGS, *SPECIAL, *NEEDLESS}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
    if unknown:
        return f"no option {unknown[0]}"
    known = {"bench": set(BENCHES), "simulate": set(scenario_names())}.get(command.name)
    first = next((word for word in words if not word.startswith("--")), None)
    if known is None or first is None or first in known or PLACEHOLDER.fullmatch(first) or first.endswith(".yaml"):
        return None
    return f"{command.name} knows no {first}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_that_a_page_names_exists(page: Path) -> None:
    assert wrong_names(page.read_text("utf-8"), page.parent) == []


@pytest.mark.parametrize(
    "text",
    [
        "see router/nowhere.py",
        "`engine/cpu/nothing.c`",
        "`nowhere.py`",
        "`tests/nowhere/`",
        "`router.nowhere.thing`",
        "`router.router.Nobody`",
        "`target.no_such_key`",
        "`Nobody` in `router/drafter/router.py`",
        "`Nobody` and `Router` (`router/drafter/router.py`)",
        "[page](docs/nowhere.md)",
        "[page](README.md#no-such-heading)",
        "`outrider fly`",
        "    outrider bench nothing",
        "    outrider bench drafters --slow",
        "    OUTRIDER_CPU=avx2 outrider simulate nothing  # 2 s",
        "    outrider train --out x \\\n        --no-such-option 1",
        "`outrider models fly`",
        "`make nothing`",
        "`outrider_requests_totl`",
    ],
)
def test_what_does_not_exist_is_found(text: str) -> None:
    assert wrong_names(text) != []


def test_what_exists_is_accepted() -> None:
    text = """
    `router/drafter/router.py`, `tests/unit/test_api_*.py`, `router/papers/NAME.py`, `bf16.c`,
    `router.drafter.router.Router`,
    `target.dtype`, `router.policy`, `router.policy.epsilon`, `Router` and `SlotReport` in `router/drafter/router.py`,
    [page](docs/operations.md#models), `config.json`, `model.safetensors`, `outrider_requests_total{status="429"}`

        OUTRIDER_CPU=avx2 outrider bench drafters [--quick] [--prompts FILE] --expect 'speedup.best.batch_1>=1.4'   # comment
        outrider models prepare smollm2-135m
        make test ARGS=-x
    """
    assert wrong_names(text) == []
