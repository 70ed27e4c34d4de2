"""How large the house is. ``make size`` prints the counts below, and fails where one is above its limit.

A limit is about what the repository has today: whoever takes away lowers it in the same commit, and a feature that raises it
says by how much. The goal is where it has to come.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from cluster.config import Config

ROOT = Path(__file__).parents[1]
PRODUCT = ("cluster", "router", "profiler", "engine", "drafters", "training", "actors", "deploy")
LABORATORY = ("benchmarks", "simulator")
SHORT, LONG = 40, 500  # lines of a file


class Limit(NamedTuple):
    """What a count may be, and where it has to come."""

    limit: int
    goal: int


LIMITS = {
    "lines of product": Limit(63_229, 47_000),
    "files of product": Limit(385, 330),
    f"files of product under {SHORT} lines": Limit(30, 25),
    f"files of product over {LONG} lines": Limit(0, 0),
    "arrows between folders of product": Limit(27, 27),
    "settings": Limit(110, 110),
    "lines of benchmarks and simulator": Limit(13_830, 12_500),
    "lines of tests": Limit(66_980, 46_000),
    "modules of product that tests import": Limit(1_938, 900),
    "monkeypatch.setattr in tests": Limit(238, 100),
    "words of README": Limit(900, 900),
    "words of docs": Limit(40_000, 40_000),
}


def sources(*folders: str) -> dict[Path, list[str]]:
    """Lines of each Python file that a person wrote."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.name.endswith("_pb2.py"))
    return {path: path.read_text().splitlines() for path in sorted(paths)}


def num_lines(files: dict[Path, list[str]]) -> int:
    return sum(len(lines) for lines in files.values())


def imports(path: Path, lines: list[str]) -> Iterator[str]:
    """Modules that a file imports, by their full names."""
    for node in ast.walk(ast.parse("\n".join(lines), str(path))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def edges(files: dict[Path, list[str]], *, to: tuple[str, ...]) -> set[tuple[Path, str]]:
    """Pairs of a file and a module in ``to`` that it imports."""
    return {(path, module) for path, lines in files.items() for module in imports(path, lines) if module.split(".")[0] in to}


def arrows(files: dict[Path, list[str]]) -> set[tuple[str, str]]:
    """Pairs of folders of the product of which the first imports the second."""
    pairs = {(path.relative_to(ROOT).parts[0], module.split(".")[0]) for path, module in edges(files, to=PRODUCT)}
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def num_settings() -> int:
    """Fields of the configuration file that hold a value; those of a type that stands in two places count once."""
    models: set[type[BaseModel]] = {Config}
    queue, count = list(models), 0
    while queue:
        for field in queue.pop().model_fields.values():
            nested = set(models_in(field.annotation))
            count += not nested
            queue.extend(nested - models)
            models |= nested
    return count


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Models that a type names at any depth, as ``dict[str, DrafterConfig] | None`` does."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from models_in(argument)


def num_words(*pages: Path) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def counts() -> list[int]:
    """The counts in the order of :data:`LIMITS`."""
    product, tests = sources(*PRODUCT), sources("tests")
    lengths = [len(lines) for lines in product.values()]
    return [
        num_lines(product),
        len(product),
        sum(length < SHORT for length in lengths),
        sum(length > LONG for length in lengths),
        len(arrows(product)),
        num_settings(),
        num_lines(sources(*LABORATORY)),
        num_lines(tests),
        len(edges(tests, to=PRODUCT)),
        sum(line.count("monkeypatch.setattr(") for lines in tests.values() for line in lines),
        num_words(ROOT / "README.md"),
        num_words(*(ROOT / "docs").rglob("*.md")),
    ]


def main() -> None:
    over = []
    print(f"{'':40}{'count':>8}{'limit':>8}{'goal':>8}")
    for (name, (limit, goal)), count in zip(LIMITS.items(), counts(), strict=True):
        print(f"{name:40}{count:8}{limit:8}{goal:8}")
        if count > limit:
            over.append(f"{name}: {count}, at most {limit}")
    sys.exit("too large: " + "; ".join(over) if over else 0)


if __name__ == "__main__":
    main()
