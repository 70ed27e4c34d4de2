"""Whether the tests notice a wrong formula: changes one operator, comparison, constant, bound or term of a paper's policies
at a time, and runs the tests of its module.

    python .ci/mutation.py [--num N] [--workers N] [MODULE...]

Exits with 1 where fewer than LEAST of the changes of a module fail a test, or it has fewer than MIN_CHANGES.
"""

import argparse
import ast
import copy
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from random import Random
from types import ModuleType
from typing import NamedTuple

import numpy  # noqa: F401  (imported once, for all forks)
import pydantic  # noqa: F401
import pytest
import scipy.optimize  # noqa: F401

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "router" / "papers"
LEAST, MIN_CHANGES = 0.95, 10
FAULT = 70  # exit code of a fork that could not test
LIMIT_S = 120  # of the tests of one change: one that makes them run for ever fails them

TESTS = {
    "adaspec": ("test_verify_papers", "test_draft_length_policies", "test_draft_stopping"),
    "dspark": ("test_verify_papers",),
    "faser": ("test_draft_length_policies",),
    "faser_exit": ("test_early_exit",),
    "not_a_bandit": ("test_lbss_and_hedge",),
    "saguaro": ("test_saguaro",),
    "specrouter": ("test_chain_policy",),
    "specrouter_estimates": ("test_similarity", "test_observed_overhead", "test_chain_policy"),
    "spin": ("test_lbss_and_hedge", "test_policies"),
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


class _Mutated(MetaPathFinder, InspectLoader):
    """Imports the changed source for the module of the change."""

    def __init__(self, change: Change) -> None:
        self._name, self._source = f"router.papers.{change.module}", change.source

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self._name else None

    def get_source(self, fullname: str) -> str:
        return self._source


def test(change: Change) -> int:
    """Runs the tests of the module with the change; returns pytest's exit code. Ends this process after LIMIT_S."""
    sys.meta_path.insert(0, _Mutated(change))
    signal.alarm(LIMIT_S)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        tests = [f"tests/unit/{name}.py" for name in TESTS[change.module]]
        return int(pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]))


def survivors(changes: Sequence[Change], num_workers: int) -> list[Change]:
    """Those with which all tests pass. Each is tested in a fork of this process."""
    found, running = [], dict[int, Change]()
    for change in (*changes, *[None] * num_workers):
        if len(running) == num_workers or (change is None and running):
            pid, status = os.wait()
            code, tested = os.waitstatus_to_exitcode(status), running.pop(pid)
            if code not in (0, 1, -signal.SIGALRM):
                raise SystemExit(f"the tests of {tested.module} end with {code}")
            if code == 0:
                found.append(tested)
        if change is not None:
            if not (pid := os.fork()):
                code = FAULT
                try:
                    code = test(change)
                finally:
                    os._exit(code)
            running[pid] = change
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=sorted(TESTS))
    parser.add_argument("--num", type=int, default=0, help="changes of a module, drawn with a fixed seed; 0: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    asked, is_good = parser.parse_args(), True
    for module in asked.modules:
        chosen = changes_of(module)
        if len(chosen) < MIN_CHANGES:
            raise SystemExit(f"{module} has {len(chosen)} places to change, fewer than {MIN_CHANGES}: is it still a policy?")
        if 0 < asked.num < len(chosen):
            chosen = Random(module).sample(chosen, asked.num)
        unnoticed = survivors(chosen, asked.workers)
        for change in unnoticed:
            print(f"router/papers/{module}.py:{change.line}: no test fails with {change.text}")
        share = 1.0 - len(unnoticed) / len(chosen)
        print(
            f"{module}: {len(chosen) - len(unnoticed)} of {len(chosen)} changes fail a test ({share:.3f}, at least {LEAST})"
        )
        is_good = is_good and share >= LEAST
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
