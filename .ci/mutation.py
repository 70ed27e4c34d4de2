"""Whether the tests notice a wrong formula: changes one operator, comparison, constant, bound or term of a paper's policies
at a time, and runs the tests of its module. Tests are imported once; each change is made in the functions of a fork.

    python .ci/mutation.py [--num N] [--workers N] [MODULE...]

Exits with 1 where fewer than LEAST of the changes of a module fail a test, or it has fewer than MIN_CHANGES.
"""

import argparse
import ast
import copy
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from random import Random
from types import FunctionType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "router" / "papers"
LEAST, MIN_CHANGES = 0.95, 10
FAULT = 70  # exit code of a fork that could not test
LIMIT_S = 60  # of processor time, of the tests of one change: one that makes them run for ever fails them
HUNG_S = 1800

TESTS = {
    "adaspec": ("test_draft_stopping.py", "test_draft_length_policies.py", "test_verify_papers.py"),
    "dspark": ("test_verify_papers.py",),
    "faser": (
        "test_draft_length_policies.py::test_faser_bounds_the_cost_of_a_length_by_a_gaussian_process",
        "test_draft_length_policies.py::test_faser_keeps_batches_apart_and_trusts_what_it_saw_often",
        "test_draft_length_policies.py::TestFaser",
    ),
    "faser_exit": ("test_early_exit.py",),
    "not_a_bandit": ("test_lbss_and_hedge.py",),
    "saguaro": ("test_saguaro.py",),
    "specrouter": ("test_chain_policy.py",),
    "specrouter_estimates": ("test_similarity.py", "test_observed_overhead.py", "test_chain_policy.py"),
    "spin": ("test_lbss_and_hedge.py", "test_policies.py"),
    "turbospec": ("test_draft_length_policies.py::TestTurboSpec", "test_verify_papers.py"),
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


def functions(members: Mapping[str, object], module: str) -> Iterator[FunctionType]:
    """Functions and methods that the module defines, in its order."""
    for value in members.values():
        if isinstance(value, type):
            if value.__module__ == module:
                yield from functions(vars(value), module)
            continue
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value


def put(change: Change) -> None:
    """Makes the change in the functions of the imported module, wherever else they are held."""
    name = f"router.papers.{change.module}"
    changed_ones = {"__name__": name}
    exec(compile(change.source, name, "exec"), changed_ones)
    imported = {one.__qualname__: one for one in functions(vars(sys.modules[name]), name)}
    for new in functions(changed_ones, name):
        if new.__qualname__ in imported and new.__code__.co_filename == name:
            old = imported[new.__qualname__]
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def run_tests(module: str, *options: str) -> int:
    """Pytest's exit code."""
    tests = [f"tests/unit/{name}" for name in TESTS[module]]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return int(pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", *options, *tests]))


def test(change: Change) -> int:
    """Runs the tests of the module with the change; returns pytest's exit code. Ends this process after LIMIT_S."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(HUNG_S)
    put(change)
    return run_tests(change.module)


def survivors(changes: Sequence[Change], num_workers: int) -> list[Change]:
    """Those with which all tests pass. Each is tested in a fork of this process."""
    found, running = [], dict[int, Change]()
    for change in (*changes, *[None] * num_workers):
        if len(running) == num_workers or (change is None and running):
            pid, status = os.wait()
            code, tested = os.waitstatus_to_exitcode(status), running.pop(pid)
            if code not in (0, 1, -signal.SIGPROF):
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
        if run_tests(module, "--collect-only"):
            raise SystemExit(f"the tests of {module} cannot be imported")
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
