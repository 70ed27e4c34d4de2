"""What `engine/vllm` uses of vLLM and another release lacks, by their sources alone: what methods return is not compared.

    python -m tests.vllm.interface WHEEL FOLDER    # in an environment with a supported release; unpacks the wheel

Imports must be found. Of the classes that `engine/vllm` imports, and of USED, each member that the supported release has and
that `engine/vllm` names or overrides must be there, and take the parameters that it took."""

import ast
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from engine.vllm.environment import VERSIONS
from tests.support.vllm_engine import vllm_arguments

OURS = sorted(Path(__file__).parents[2].joinpath("engine", "vllm").glob("*.py"))
USED = (  # classes of objects that vLLM hands out
    "vllm.config.model.ModelConfig",
    "vllm.v1.core.block_pool.BlockPool",
    "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "vllm.v1.core.sched.output.NewRequestData",
    "vllm.v1.core.sched.request_queue.RequestQueue",
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
    "vllm.v1.worker.gpu.async_utils.AsyncOutput",
    "vllm.v1.worker.gpu.input_batch.InputBatch",
    "vllm.v1.worker.gpu.model_runner.ExecuteModelState",
    "vllm.v1.worker.gpu.states.RequestState",
    "vllm.v1.worker.gpu_input_batch.InputBatch",
    "vllm.v1.worker.gpu_model_runner.ExecuteModelState",
)

Node = ast.AST
Members = dict[str, Node]


class Module:
    """One of vLLM's, by its dotted name. ``names``: what it defines or imports outside functions, in branches, too."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.names: Members = {}
        self._package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
            for one in defined(node):
                self.names[one] = node

    def origin(self, name: str) -> str | None:
        """Where the module imports ``name`` from, dotted; None: from nowhere."""
        node = self.names.get(name)
        if not isinstance(node, ast.ImportFrom):
            return None
        alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
        package = self._package[: len(self._package) - node.level + 1] if node.level else []
        return ".".join([*package, *filter(None, [node.module]), alias.name])


class Release:
    """``root``: holds the folder ``vllm``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            base = self._root.joinpath(*name.split("."))
            path = next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)
            self._modules[name] = None if path is None else Module(name, path)
        return self._modules[name]

    def find(self, dotted: str) -> tuple[Module, Node | None] | None:
        """The module and definition of a dotted name; of a module itself, no definition."""
        if (module := self.module(dotted)) is not None:
            return module, None
        parent, _, name = dotted.rpartition(".")
        module = self.module(parent) if parent else None
        if module is None or name not in module.names:
            return None
        origin = module.origin(name)
        return self.find(origin) if origin is not None and origin != dotted else (module, module.names[name])

    def members(self, dotted: str) -> Members | None:
        """Of a class and its bases in vLLM: methods as they are defined, and attributes. None: there is no such class."""
        found = self.find(dotted)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        module, node = found
        inherited: Members = {}
        for base in map(ast.unparse, reversed(node.bases)):
            origin = module.origin(base) or f"{module.name}.{base}"
            inherited |= (self.members(origin) or {}) if origin != dotted else {}
        return inherited | own_members(node)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of branches included, of functions and classes not."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try | ast.With) else ():
            yield from statements(getattr(node, field, []))


def defined(node: Node) -> list[str]:
    """The names that a statement binds."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        case ast.Assign(targets=targets):
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def own_members(node: ast.ClassDef) -> Members:
    set_in_methods = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    attributes: Members = {n.attr: n for n in set_in_methods if ast.unparse(n.value) == "self"}
    return attributes | {name: statement for statement in statements(node.body) for name in defined(statement)}


def missing(supported: Release, other: Release) -> list[str]:
    """One line for each part of the interface that ``other`` lacks."""
    files = [list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in OURS]
    nodes, by_file = [node for file in files for node in file], [imported(file) for file in files]
    imports = {dotted for own in by_file for dotted in own.values()}
    overrides = {one.name: one for node in nodes if isinstance(node, ast.ClassDef) for one in node.body if is_method(one)}
    named = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | set(overrides)
    lines = [f"{dotted} is gone" for dotted in (*imports, *USED) if other.find(dotted) is None]
    for file, own in zip(files, by_file, strict=True):
        for node in file:
            if isinstance(node, ast.Attribute) and (dotted := own.get(ast.unparse(node.value))) is not None:
                found = other.find(dotted)
                if found is not None and found[1] is None and node.attr not in found[0].names:
                    lines.append(f"{dotted}.{node.attr} is gone")
    for dotted in (*imports, *USED):
        before, after = supported.members(dotted) or {}, other.members(dotted)
        for name in sorted(named & set(before)) if after is not None else ():
            if name not in after:
                lines.append(f"{dotted}.{name} is gone")
            elif (change := changed(before[name], after[name], overrides.get(name))) is not None:
                lines.append(f"{dotted}.{name}: {change}")
    arguments = vllm_arguments("cuda")
    engine_args = other.find("vllm.engine.arg_utils.EngineArgs")
    fields = statements(engine_args[1].body) if engine_args and isinstance(engine_args[1], ast.ClassDef) else ()
    known = {name for field in fields for name in defined(field)}
    lines += [f"EngineArgs has no {name}" for name in arguments if name not in known]
    return sorted(set(lines))


def imported(nodes: Sequence[Node]) -> dict[str, str]:
    """What a file imports of vLLM, dotted, by the file's name of it."""
    lines = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm"]
    return {alias.asname or alias.name: f"{line.module}.{alias.name}" for line in lines for alias in line.names}


def is_method(node: Node) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def changed(before: Node, after: Node, ours: Node | None) -> str | None:
    """How the parameters of a method have changed, if its callers would notice. ``ours``: overrides it."""
    if not isinstance(before, ast.FunctionDef) or not isinstance(after, ast.FunctionDef):
        return None
    old, new = parameters(before), parameters(after)
    if gone := [name for name in old if name not in new]:
        return f"takes no {', '.join(gone)}"
    if [name for name in new if name in old] != list(old):
        return f"takes its parameters in another order: {', '.join(new)}"
    takes_all = isinstance(ours, ast.FunctionDef) and ours.args.kwarg is not None
    added = [name for name, is_needed in new.items() if name not in old and (is_needed or not (ours is None or takes_all))]
    return f"takes {', '.join(added)}, too" if added else None


def parameters(node: ast.FunctionDef) -> Mapping[str, bool]:
    """Whether each must be given, by name."""
    positional = [*node.args.posonlyargs, *node.args.args]
    num_needed = len(positional) - len(node.args.defaults)
    needed = {arg.arg: i < num_needed for i, arg in enumerate(positional)}
    return needed | {
        arg.arg: default is None for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    }


def vllm_folder() -> Path:
    """Of the installed release."""
    package = find_spec("vllm")
    assert package is not None, "vLLM is not in this environment"
    return Path(package.origin or "").parent


def unpack(wheel: Path, folder: Path) -> None:
    """Puts the wheel's sources over the operators of the CPU build that is installed, since vLLM publishes none of its own.
    Their metadata name a release that is supported, so that tests take what is not yet."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("vllm/") and name[-3:] != ".so"])
    for operators in Path(vllm_folder()).glob("*.so"):
        (folder / "vllm" / operators.name).symlink_to(operators)
    metadata = folder / "vllm-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSIONS[-1]}+cpu\n")


if __name__ == "__main__":
    wheel, folder = map(Path, sys.argv[1:])
    unpack(wheel, folder)
    gone = missing(Release(vllm_folder().parent), Release(folder))
    print("\n".join(gone) or f"{wheel.name} has all that is used")
    sys.exit(bool(gone))
