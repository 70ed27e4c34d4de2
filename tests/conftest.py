"""Fixtures shared by suites."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from cluster import transport as factory
from cluster.errors import ModelUnavailable
from engine.cpu_setup import configure_cpu
from engine.models.manifest import MANIFEST, TENSORS
from engine.models.prepare import CATALOGUE, ensure_model
from tests.support.simulated_network import EncodingNetwork

if TYPE_CHECKING:
    from engine.grammar.compiling import Grammars

# Products of tiny models are too small for several threads, which made a suite ten times slower on a busy machine. Read by
# torch at its import, which is later.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until all tests are collected

configure_cpu()  # at the level that OUTRIDER_CPU names, before any test computes

hypothesis.settings.register_profile("tests", deadline=None)  # no test asserts a wall time
hypothesis.settings.register_profile("fast", deadline=None, max_examples=20)
hypothesis.settings.load_profile("tests")

factory.LOCAL = EncodingNetwork()

MODEL = "smollm2-135m"
TESTS = Path(__file__).parent
SUITES = ("unit", "contract")  # in this order; then the others
DATA_VARIABLE = "OUTRIDER_DATA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests first: unit tests, contracts, the rest, and last those that start a Ray cluster."""
    order = {suite: i for i, suite in enumerate(SUITES)}

    def rank(item: pytest.Item) -> tuple[bool, int]:
        suite = item.path.relative_to(TESTS).parts[0]
        return item.get_closest_marker("ray") is not None, order.get(suite, len(SUITES))

    items.sort(key=rank)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """A full collection over modules and tests takes a second, and there are dozens in a run."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in bf16 safetensors, as any Hugging Face folder. Skips without its package."""
    try:
        CATALOGUE[MODEL].source()
    except ModelUnavailable as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("model") / MODEL
    folder.mkdir()
    for file in ensure_model(MODEL, engine="vllm").iterdir():
        if file.name not in (MANIFEST, TENSORS):
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with 257 tokens."""
    from tests.support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def grammars(tiny_model_folder: Path) -> "Grammars":
    """Of 256 one-byte tokens and the end of sequence."""
    from tests.support.grammars import of_tiny_model

    return of_tiny_model(tiny_model_folder)


@pytest.fixture(scope="module")
def known_costs() -> Iterator[None]:
    """Targets that are loaded from a configuration take their pass times from a table: to measure takes a second or two."""
    from engine import loading
    from router.cost_model import TableCost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "measure_cost", lambda engine: TableCost((1, 8, 64), (0.01, 0.012, 0.03), 1e-7))
        yield


@pytest.fixture(scope="session")
def data_folder(pytestconfig: pytest.Config) -> Path:
    """Prompts and traces beside the repository. Skips without them."""
    folder = Path(os.environ.get(DATA_VARIABLE) or pytestconfig.rootpath.parent / "shared" / "data")
    if not (folder / "prompts").is_dir():
        pytest.skip(f"no prompts under {folder}: set {DATA_VARIABLE} to the folder that holds prompts/ and traces/")
    return folder
