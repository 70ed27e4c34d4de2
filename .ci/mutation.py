"""Whether the tests notice a wrong formula: changes one operator, comparison, constant, bound or term of a paper's policies
at a time, and runs the tests of its module.

    python .ci/mutation.py [--num N] [--workers N] [MODULE...]

Exits with 1 where fewer than LEAST of the changes fail a test, or a module has fewer than MIN_CHANGES.
"""

import argparse
import ast
import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "router" / "papers"
LEAST, MIN_CHANGES = 0.95, 10
LIMIT_S = 120.0  # of the tests of one change: one that makes them run for ever fails them

UNIT = "tests/unit/"
TESTS = {
    "adaspec": ("test_verify_papers", "test_draft_length_policies", "test_draft_stopping"),
    "dspark": ("test_verify_papers",),
    "faser": ("test_draft_length_policies",),
    "faser_exit": ("test_early_exit",),
    "saguaro": ("test_outcomes",),
    "specrouter": ("test_chain_policy", "test_router"),
    "specrouter_estimates": ("test_similarity", "test_observed_overhead", "test_chain_policy"),
    "spin": ("test_lbss_and_hedge", "test_router"),
    "turbospec": ("test_verify_papers", "test_draft_length_policies"),
}

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_BOUNDS = {"max": "min", "min": "max", "argmax": "argmin", "argmin": "argmax", "maximum": "minimum", "minimum": "maximum"}


class Change(NamedTuple):
    """``source``: of the whole module with it."""

    module: str
    line: int
    text: str
    source: str


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one thing wrong, in each way."""
    new = copy.copy(node)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            yield node.left  # without the other term
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else 2 * node.value + 0.1)
    elif isinstance(node, ast.Name) and node.id in _BOUNDS:
        yield ast.Name(_BOUNDS[node.id], node.ctx)
    elif isinstance(node, ast.Attribute) and node.attr in _BOUNDS:
        yield ast.Attribute(node.value, _BOUNDS[node.attr], node.ctx)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        assert isinstance(new, ast.BoolOp)
        new.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield new


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where expressions stand in functions: parent, field and index; not in annotations."""
    for parent in (
        node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    ):
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns"):
                continue
            if isinstance(value, ast.expr):
                yield parent, name, None
            elif isinstance(value, list):
                yield from ((parent, name, i) for i, one in enumerate(value) if isinstance(one, ast.expr))


def changes_of(module: str) -> list[Change]:
    tree = ast.parse((PAPERS / f"{module}.py").read_text())
    found = []
    for parent, name, i in places(tree):
        node = getattr(parent, name) if i is None else getattr(parent, name)[i]
        for new in changed(node):
            _put(parent, name, i, new)
            found.append(Change(module, node.lineno, f"{ast.unparse(node)}  ->  {ast.unparse(new)}", ast.unparse(tree)))
            _put(parent, name, i, node)
    return found


def _put(parent: ast.AST, name: str, i: int | None, node: ast.AST) -> None:
    if i is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[i] = node


def is_noticed(change: Change) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{change.module}.py"
        file.write_text(change.source)
        tests = [f"{UNIT}{name}.py" for name in TESTS[change.module]]
        python_path = os.pathsep.join((str(Path(__file__).parent), str(ROOT)))
        environment = {**os.environ, "MUTANT": f"router.papers.{change.module}:{file}", "PYTHONPATH": python_path}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "mutant", "-p", "no:cacheprovider", *tests]
        try:
            child = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return True
    if child.returncode not in (0, 1):
        raise SystemExit(f"the tests of {change.module} could not run:\n{child.stdout}{child.stderr}")
    return child.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=sorted(TESTS))
    parser.add_argument("--num", type=int, default=0, help="changes of a module, drawn with a fixed seed; 0: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    chosen: list[Change] = []
    for module in asked.modules:
        found = changes_of(module)
        if len(found) < MIN_CHANGES:
            raise SystemExit(f"{module} has {len(found)} places to change, fewer than {MIN_CHANGES}: is it still a policy?")
        chosen += Random(module).sample(found, asked.num) if 0 < asked.num < len(found) else found
    with ThreadPoolExecutor(asked.workers) as workers:
        noticed = list(workers.map(is_noticed, chosen))
    for change, seen in zip(chosen, noticed, strict=True):
        if not seen:
            print(f"router/papers/{change.module}.py:{change.line}: no test fails with {change.text}")
    share = sum(noticed) / len(noticed)
    print(f"{sum(noticed)} of {len(noticed)} changes fail a test ({share:.3f}, at least {LEAST})")
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
