"""How each system is started. Every arm serves the same weights over HTTP."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import httpx
import psutil

from benchmarks.compare.arms import (
    ENVIRONMENTS,
    LLAMA_CPP,
    NGRAM,
    OUTRIDER,
    OUTRIDER_VLLM,
    PLUGIN,
    Q4_1,
    VLLM,
    Arm,
    PeerMissing,
)
from benchmarks.compare.gguf_variants import write_variant
from benchmarks.load import HttpTarget
from benchmarks.serve import local_config
from benchmarks.server import ChildServer, ServerProcess
from cluster.config import CascadeOptions, Config, NgramOptions, SuffixOptions, TableOptions, TargetConfig
from deploy.local_ray import descendants, end_all, free_port
from drafters.shipped import shipped_options
from drafters.vllm_plugin.proposer import SETTING, PoolProposer
from engine.vllm.environment import BINDING
from profiler.hardware import num_cores

FAMILIES = (OUTRIDER, OUTRIDER_VLLM, PLUGIN, VLLM, LLAMA_CPP)
ROOT = Path(__file__).resolve().parents[2]
MAX_MODEL_LEN = 2048
MAX_STREAMS = 32
NGRAM_LEN, DRAFT_LEN = 4, 8  # of every n-gram drafter that is compared
VLLM_BLOCK_LEN: Literal[32] = 32  # what vLLM takes on a CPU
FEW_CORES = 2  # both of which a target takes (cluster.resolve)
DTYPES: dict[str, Literal["bfloat16", "float32", "as-shipped"]] = {
    "bf16": "bfloat16",
    "fp32": "float32",
    Q4_1: "as-shipped",
}


STOP_S = 20.0


class PeerServer(ChildServer):
    """At ``port`` of loopback.

    Args:
        command: of the server; ``{port}`` in an argument stands for the port.
        environment: variables beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = free_port()
        command = [part.replace("{port}", str(self.port)) for part in command]
        super().__init__(command, os.environ | dict(environment), f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        if self.is_running():
            self.resume()
            end_all([psutil.Process(self.pid), *descendants(self.pid)], STOP_S)
            self.wait_end(STOP_S)

    def _is_ready(self) -> bool:
        try:
            with self.client(timeout_s=5.0) as client:
                return client.get("/health").status_code == HTTPStatus.OK
        except httpx.TransportError:
            return False  # it does not listen yet


@dataclass(frozen=True, slots=True)
class PeerCommand:
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningArm:
    arm: Arm
    target: HttpTarget
    process: PeerServer | ServerProcess
    must_draft: bool = True  # in its turn, if its arm drafts


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model as each system reads it.

    Args:
        gguf: quantised to Q4_1, for llama.cpp.
        scratch: a folder for other precisions.
    """

    name: str
    folder: Path
    gguf: Path
    scratch: Path

    def gguf_of(self, precision: str) -> Path:
        if precision == Q4_1:
            return self.gguf
        file = self.scratch / f"{precision}.gguf"
        if not file.exists():
            write_variant(self.gguf, file, precision)
        return file


def python_of(family: str) -> Path:
    """The interpreter of a family's environment.

    Raises:
        PeerMissing: the environment is not there.
    """
    name = ENVIRONMENTS.get(family)
    if name is None:
        return Path(sys.executable)
    path = ROOT / f".venv-{name}" / "bin" / "python"
    if not path.exists():
        raise PeerMissing(f"{path.relative_to(ROOT)} is not there: run benchmarks/compare/setup.sh {name}")
    return path


def lookups_for(model: str) -> CascadeOptions:
    """The default pool's cascade without models, with the table that is shipped for ``model``."""
    tables = [options for options in shipped_options(model).values() if isinstance(options, TableOptions)]
    return CascadeOptions(members=(NgramOptions(), SuffixOptions(), *(tables or [TableOptions()])))


def missing_families() -> dict[str, str]:
    """Why a family cannot be measured."""
    reasons = {}
    for family in FAMILIES:
        try:
            python_of(family)
        except PeerMissing as error:
            reasons[family] = str(error)
    return reasons


@contextmanager
def running(arms: Sequence[Arm], files: ModelFiles) -> Iterator[list[RunningArm]]:
    """All servers, started one after the other. They are suspended until their turn."""
    with ExitStack() as stack:
        servers: dict[str, RunningArm] = {}
        found = []
        for arm in arms:
            if arm.server not in servers:
                servers[arm.server] = _start(arm, files, stack)
            found.append(replace(servers[arm.server], arm=arm))
        yield found


def _start(arm: Arm, files: ModelFiles, stack: ExitStack) -> RunningArm:
    if arm.family in (OUTRIDER, OUTRIDER_VLLM):
        config = outrider_config(arm, files.name)
        own = stack.enter_context(ServerProcess(config, python=python_of(arm.family)))
        stack.callback(own.resume)  # it can end only then
        own.suspend()
        return RunningArm(arm, HttpTarget(config.api.host, config.api.port, config.model.name), own)
    started = peer_command(arm, files)
    server = stack.enter_context(PeerServer(started.command, started.environment))
    server.suspend()
    return RunningArm(arm, HttpTarget("127.0.0.1", server.port, "model"), server)


def outrider_config(arm: Arm, model: str) -> Config:
    if arm.family == OUTRIDER:
        return local_config(model, TargetConfig(dtype=DTYPES[arm.precision]))
    return local_config(model, TargetConfig(engine="vllm", dtype=DTYPES[arm.precision], block_len=VLLM_BLOCK_LEN))


def peer_command(arm: Arm, files: ModelFiles) -> PeerCommand:
    """Raises PeerMissing where the environment is not there."""
    python = str(python_of(arm.family))
    if arm.family in (VLLM, PLUGIN):
        return _vllm_command(python, arm, files)
    script = Path(__file__).with_name("llama_server.py")
    numbers = ("{port}", MAX_STREAMS, MAX_MODEL_LEN, NGRAM_LEN, DRAFT_LEN if arm.drafting == NGRAM else 0)
    return PeerCommand((python, str(script), str(files.gguf_of(arm.precision)), *map(str, numbers)))


def _vllm_command(python: str, arm: Arm, files: ModelFiles) -> PeerCommand:
    """Eager, since vLLM 0.32 compiled answers wrongly in bf16 on a CPU; passive, since else its idle threads spin. Of two
    cores its worker computes on both, as a target of ours does: by default it leaves one to its scheduler and is slower."""
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(files.folder)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", DTYPES[arm.precision]),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_STREAMS), "--enforce-eager"),
        *("--served-model-name", "model"),
    ]
    if arm.drafting == NGRAM:
        lookup = f'"num_speculative_tokens": {DRAFT_LEN}, "prompt_lookup_max": {NGRAM_LEN}, "prompt_lookup_min": 1'
        command += ["--speculative-config", f'{{"method": "ngram", {lookup}}}']
    elif arm.family == PLUGIN:
        proposer = f"{PoolProposer.__module__}.{PoolProposer.__qualname__}"
        draft = f'"model": "{proposer}", "num_speculative_tokens": {DRAFT_LEN}'
        command += ["--speculative-config", f'{{"method": "custom_class", {draft}}}']
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",  # as on our target: threads that share a context wait for each other on busy cores
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if arm.family == PLUGIN:
        environment |= {SETTING: lookups_for(files.name).model_dump_json(), "PYTHONPATH": str(ROOT)}
    cpus = sorted(os.sched_getaffinity(0))
    if num_cores() == len(cpus) == FEW_CORES:
        environment[BINDING] = ",".join(map(str, cpus))
    return PeerCommand(tuple(command), environment)
