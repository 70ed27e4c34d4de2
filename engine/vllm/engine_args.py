"""The arguments of vLLM's engine. Does not import vLLM, which takes seconds."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def argument_switches() -> Mapping[str, bool]:
    """Fields of ``EngineArgs`` in the installed vLLM, read from its source, and whether each is a switch. Empty
    without vLLM."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return {}
    source = Path(package.origin).with_name("engine").joinpath("arg_utils.py").read_text(encoding="utf-8")
    (arguments,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    types = {
        node.target.id: ast.unparse(node.annotation)
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: kind in ("bool", "bool | None") for name, kind in types.items() if not name.startswith("_")}
