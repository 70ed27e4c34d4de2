"""The CUDA kernels, compiled for GPUs that are not here: types, tiles and shared memory, which no interpreter checks."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.triton_aot import SHARED_BYTES, begin_worker, cases, compile_all, refusal

pytestmark = pytest.mark.slow

if find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

SAMPLING = {"peaks_kernel", "choose_kernel"}
EARLY_EXIT = {"watched_norm_kernel", "draft_logit_kernel"}
KERNELS = {"add_norm_kernel", "rotate_and_store_kernel", "attention_kernel", "gate_kernel"} | SAMPLING | EARLY_EXIT


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    cache = str(tmp_path_factory.mktemp("triton"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, begin_worker, ({"TRITON_CACHE_DIR": cache},)) as pool:
        yield pool


@pytest.mark.timeout(900)  # half a minute on two cores of its own; the time of compilers is not bounded from here
def test_every_kernel_compiles_and_fits_the_shared_memory_of_its_gpu(
    workers: ProcessPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = cases()
    start_s = time.perf_counter()
    num_compiled = 0
    for case, found in zip(chosen, workers.map(compile_all, chosen), strict=True):
        names = {compiled.kernel for compiled in found}
        assert names == (KERNELS if case.heads[0] else KERNELS - {"attention_kernel"}), case
        for compiled in found:
            assert compiled.cubin_bytes > 0, (case, compiled)
            assert compiled.shared_bytes <= SHARED_BYTES[case.arch], (case, compiled)
        num_compiled += len(found)
    with capsys.disabled():
        print(f"\n{num_compiled} kernels of {len(chosen)} models compiled in {time.perf_counter() - start_s:.0f} s")


def test_kernels_that_cannot_be_compiled_are_said_to_be_unavailable(workers: ProcessPoolExecutor, tmp_path: Path) -> None:
    assembler = tmp_path / "ptxas"
    assembler.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo "release 12.9, V12.9.0";; *) echo broken >&2; exit 1;; esac\n'
    )
    assembler.chmod(0o755)
    assert "PTXASError" in workers.submit(refusal, cases()[0], str(assembler), str(tmp_path / "cache")).result()
