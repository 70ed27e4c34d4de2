"""The systems that are compared, and how each is started. Every arm serves the same weights over HTTP."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare.gguf_variants import write_variant
from benchmarks.compare.peer_server import PeerServer
from benchmarks.load import HttpTarget
from benchmarks.serve import local_config
from benchmarks.server import ServerProcess
from cluster.errors import OutriderError
from engine.cpu_level import AMX, AVX512_BF16, cpu_level

ROOT = Path(__file__).resolve().parents[2]
MAX_MODEL_LEN = 2048
MAX_STREAMS = 32
NGRAM_LEN, DRAFT_LEN = 4, 8  # of every n-gram drafter that is compared

OUTRIDER, VLLM, LLAMA_CPP = "outrider", "vllm", "llama.cpp"


class PeerMissing(OutriderError):
    """A peer's environment is not there."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve the model.

    Args:
        precision: of the weights: bf16, fp32, q8_0 ...
        drafting: as of Outrider's API; other servers ignore it.
        server: None where another arm's server answers, too.
    """

    name: str
    family: str
    precision: str
    speculative: bool
    server: str
    drafting: str = "auto"


@dataclass(frozen=True, slots=True)
class PeerCommand:
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningArm:
    arm: Arm
    target: HttpTarget
    process: PeerServer | None  # None: never suspended


def best_precision() -> str:
    """Of vLLM and Outrider on this CPU: bf16 where torch multiplies it fast."""
    return "bf16" if str(cpu_level()) in (AVX512_BF16, AMX) else "fp32"


def vllm_command(folder: Path, precision: str, speculation: str | None) -> PeerCommand:
    """Eager, since vLLM 0.32 compiled answers wrongly in bf16 on a CPU; passive, since else its idle threads spin.

    Raises:
        PeerMissing: there is no `.venv-vllm`.
    """
    command = [
        *(str(_python("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", {"bf16": "bfloat16", "fp32": "float32"}[precision]),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_STREAMS), "--enforce-eager"),
        *("--served-model-name", "model"),
    ]
    if speculation is not None:
        command += ["--speculative-config", speculation]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    return PeerCommand(tuple(command), environment)


NGRAM = (
    f'{{"method": "ngram", "num_speculative_tokens": {DRAFT_LEN}, "prompt_lookup_max": {NGRAM_LEN}, "prompt_lookup_min": 1}}'
)


def llama_command(gguf: Path, draft_len: int) -> PeerCommand:
    """Raises PeerMissing where there is no `.venv-llamacpp`."""
    script = Path(__file__).with_name("llama_server.py")
    numbers = ("{port}", MAX_STREAMS, MAX_MODEL_LEN, NGRAM_LEN, draft_len)
    return PeerCommand((str(_python("llamacpp")), str(script), str(gguf), *map(str, numbers)))


def _python(peer: str) -> Path:
    path = ROOT / f".venv-{peer}" / "bin" / "python"
    if not path.exists():
        raise PeerMissing(f"{path} is not there: run benchmarks/compare/setup.sh {peer}")
    return path


def chosen_arms(quick: bool, peers: Sequence[str]) -> tuple[Arm, ...]:
    """In the order of their turns."""
    best = best_precision()
    arms = [
        # Of one server, which learns from answers: with drafts first, so that it knows none of the prompts. The plain arm
        # finds them in its prefix cache.
        Arm("outrider", OUTRIDER, "bf16", True, "outrider"),
        Arm("outrider, no drafting", OUTRIDER, "bf16", False, "outrider", "off"),
    ]
    if VLLM in peers:
        for precision in (best,) if quick else ("bf16", "fp32"):
            arms += [
                Arm(f"vLLM {precision}", VLLM, precision, False, f"vllm-{precision}"),
                Arm(f"vLLM {precision}, n-gram", VLLM, precision, True, f"vllm-{precision}-ngram"),
            ]
    if LLAMA_CPP in peers:
        for precision in ("bf16", "q4_1") if quick else ("bf16", "f16", "q8_0", "q4_1"):
            arms += [
                Arm(f"llama.cpp {precision}", LLAMA_CPP, precision, False, f"llama-{precision}"),
                Arm(f"llama.cpp {precision}, n-gram", LLAMA_CPP, precision, True, f"llama-{precision}-ngram"),
            ]
    return tuple(arms)


def found_peers() -> dict[str, str]:
    """Why each peer cannot be measured, "" where it can."""
    reasons = {}
    for family, peer in ((VLLM, "vllm"), (LLAMA_CPP, "llamacpp")):
        try:
            _python(peer)
            reasons[family] = ""
        except PeerMissing as error:
            reasons[family] = str(error)
    return reasons


@contextmanager
def running(arms: Sequence[Arm], model: str, folder: Path, gguf: Path, scratch: Path) -> Iterator[list[RunningArm]]:
    """All servers, started one after the other; peers are suspended until their turn.

    Args:
        gguf: the model as llama.cpp reads it, quantised to Q4_1.
        scratch: a folder for its other precisions.
    """
    config = local_config(model)
    with ExitStack() as stack:
        stack.enter_context(ServerProcess(config))
        own = HttpTarget(config.api.host, config.api.port, config.model.name)
        peers: dict[str, PeerServer] = {}
        found = []
        for arm in arms:
            if arm.family == OUTRIDER:
                found.append(RunningArm(arm, own, None))
                continue
            if arm.server not in peers:
                started = _command(arm, folder, gguf, scratch)
                server = PeerServer(arm.server, started.command, started.environment)
                peers[arm.server] = stack.enter_context(server)
                server.suspend()
            server = peers[arm.server]
            found.append(RunningArm(arm, HttpTarget("127.0.0.1", server.port, "model"), server))
        yield found


def _command(arm: Arm, folder: Path, gguf: Path, scratch: Path) -> PeerCommand:
    if arm.family == VLLM:
        return vllm_command(folder, arm.precision, NGRAM if arm.speculative else None)
    file = gguf
    if arm.precision != "q4_1":
        file = scratch / f"{arm.precision}.gguf"
        if not file.exists():
            write_variant(gguf, file, arm.precision)
    return llama_command(file, DRAFT_LEN if arm.speculative else 0)
