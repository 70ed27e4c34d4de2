"""What is compared: each way to serve the model is an arm, and some arms share a server."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import OutriderError
from engine.cpu_level import AMX, AVX512_BF16, cpu_level

OUTRIDER, OUTRIDER_VLLM, VLLM, LLAMA_CPP = "outrider", "outrider on vLLM", "vLLM", "llama.cpp"
PLUGIN = "outrider in vLLM"  # our lookups in vLLM's own server
ENVIRONMENTS = {OUTRIDER_VLLM: "vllm", PLUGIN: "vllm", VLLM: "vllm", LLAMA_CPP: "llamacpp"}  # beside our own: `.venv-NAME`

NUM_SETS = 2  # of prompts; arms with one server answer different ones

PLAIN, NGRAM, POOL, LOOKUPS = "no drafting", "n-gram", "pool", "lookups"
Q4_1 = "q4_1"


class PeerMissing(OutriderError):
    """A peer's environment is not there."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve the model.

    Args:
        precision: of the weights: bf16, fp32, q8_0 ...; Q4_1: as SmolLM2's weights are shipped.
        drafting: PLAIN, NGRAM, of Outrider's server POOL, or of PLUGIN LOOKUPS.
    """

    family: str
    precision: str
    drafting: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.precision}, {self.drafting}"

    @property
    def server(self) -> str:
        """Arms of one server differ in what each request asks for."""
        return f"{self.family} {self.precision}" if self.family in (OUTRIDER, OUTRIDER_VLLM) else self.name

    @property
    def prompt_set(self) -> int:
        """The prompts that it answers."""
        return int(self.server != self.name and self.drafting == PLAIN)

    @property
    def request_drafting(self) -> str:
        """As of Outrider's API; other servers ignore it."""
        return "off" if self.drafting == PLAIN else "auto"


def best_precision() -> str:
    """Of vLLM on this CPU: bf16 where torch multiplies it fast."""
    return "bf16" if str(cpu_level()) in (AVX512_BF16, AMX) else "fp32"


def chosen_arms(quick: bool, families: Sequence[str]) -> tuple[Arm, ...]:
    """In the order of their turns."""
    best = best_precision()
    arms = []
    for family in families:
        if family == OUTRIDER:
            arms += [Arm(family, precision, kind) for precision in ("bf16", Q4_1) for kind in (POOL, PLAIN)]
        elif family == OUTRIDER_VLLM:
            arms += [Arm(family, best, POOL), Arm(family, best, PLAIN)]
        elif family == PLUGIN:
            arms.append(Arm(family, best, LOOKUPS))
        elif family == VLLM:
            precisions = (best,) if quick else ("bf16", "fp32")  # with both its servers and the others take over 24 GB
            arms += [Arm(family, precision, kind) for precision in precisions for kind in (PLAIN, NGRAM)]
        else:
            of_file = ("bf16", Q4_1) if quick else ("bf16", "f16", "q8_0", Q4_1)
            arms += [Arm(family, precision, kind) for precision in of_file for kind in (PLAIN, NGRAM)]
    return tuple(arms)
