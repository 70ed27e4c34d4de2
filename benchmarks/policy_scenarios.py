"""What ``outrider bench policies`` simulates: machines, loads and arms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from zlib import crc32

import numpy as np

from benchmarks.simulate import FOLDER
from cluster.config import DrafterConfig, DraftLengthConfig
from router.cost_model import CostModel
from router.planning.planner import PlannerSettings, StepPlanner
from simulator.agreement import Agreement, AgreementAnswer, SimulatedRequest
from simulator.cascade import MemberSpec
from simulator.recording import AgreementRecording, read_recording
from simulator.scenario import Lens, ServingScenario, read_scenario
from simulator.serving import read_trace
from simulator.simulation import ClusterSpec, DrafterSpec, Load
from simulator.speculation import Arm, VerificationAlone
from simulator.synthetic import Family
from simulator.target import TargetLimits
from simulator.timing import DraftByCost, PackedPass

DRAFT_LEN = 8
MAX_SEQUENCES = 64
TOKEN_SPREAD = 1.5  # logits: confidences of `dspark` as recorded separate right from wrong tokens as well (AUROC 0.83)
TRACE_LOAD = 0.8  # of what plain decoding can serve, mean over the trace
SYNTHETIC_TRACE = "synthetic"
BATCHES = (1, 2, 4, 8, 16, 32, 64)

PLAIN = Arm("plain", None)
FIXED = tuple(Arm(f"fixed-{length}", DraftLengthConfig(kind="fixed", num_tokens=length), "all") for length in (1, 2, 4, 8))
PAPERS = (
    Arm("adaspec", DraftLengthConfig(kind="adaspec"), "adaspec"),
    Arm("faser", DraftLengthConfig(kind="faser"), "all"),
    Arm("turbospec", DraftLengthConfig(kind="turbospec"), "all"),
    Arm("dspark", DraftLengthConfig(kind="fixed", num_tokens=DRAFT_LEN), "dspark"),
    Arm("dspark-async", DraftLengthConfig(kind="fixed", num_tokens=DRAFT_LEN), "dspark-async"),
    Arm("spin", DraftLengthConfig(kind="fixed", num_tokens=4), "all", "micro-batch"),
)
DEFAULT = Arm("outrider", DraftLengthConfig())
# That are compared under objectives. AdaSpec says nothing of prompts; the last arm has the default's chunks.
ADASPEC_SLO = Arm("adaspec", DraftLengthConfig(kind="adaspec"), "adaspec", planner=VerificationAlone)
UNDER_SLO = (ADASPEC_SLO, DEFAULT, Arm("adaspec, chunks by objectives", DraftLengthConfig(kind="adaspec"), "adaspec"), PLAIN)
ARMS = (PLAIN, *FIXED, *PAPERS, DEFAULT)
# The papers' own ablations: AdaSpec, table 2 (with `adaspec`); FASER, figure 15 (with `fixed-4` and `faser`; no early exit).
TABLE_2 = (
    Arm("threshold", DraftLengthConfig(kind="threshold"), "all"),
    Arm("adaspec-", DraftLengthConfig(kind="adaspec"), "all"),
)
FIGURE_15 = (Arm("faser-overlap", DraftLengthConfig(kind="faser"), "all", "frontier"),)


@dataclass(frozen=True)
class Text:
    """Where answers come from: a family of drafters, or a recording, of whose answers ``drafter`` is one."""

    prompt_len: Lens
    output_len: Lens
    family: Family | None = None
    recording: Path | None = None


@dataclass(frozen=True)
class Machine:
    """A target and one drafter beside it. ``measured``: its costs are, on this machine."""

    name: str
    cost: CostModel
    drafter: DrafterSpec
    texts: tuple[Text, ...]
    link_s: float = 1e-4
    num_blocks: int = 65_536
    max_prompt_len: int = 2048
    max_output_len: int = 384
    chunk_len: int = 2048
    measured: bool = False

    def spec(self) -> ClusterSpec:
        limits = TargetLimits(16, self.num_blocks, MAX_SEQUENCES, 2048, 2**20, max_waiting=2**16)
        cost = self.cost
        drafters = (self.drafter,)
        return ClusterSpec(cost, PackedPass(cost), DraftByCost(cost), limits, drafters, StepPlanner, link_s=self.link_s)

    def settings(self) -> PlannerSettings:
        return PlannerSettings(max_chunk_len=self.chunk_len)

    def token_s(self, batch: int, context_len: int = 512) -> float:
        """Of a token of one request in plain decoding of so many."""
        return self.cost.step_s(batch, batch * context_len)


@dataclass(frozen=True, slots=True)
class Workload:
    """``batch`` requests in a closed loop, for as long as plain decoding takes for their first prompts and ``num_tokens``;
    or a trace, of which ``num_requests`` are taken at equal distances, at TRACE_LOAD of what the machine can do."""

    name: str
    batch: int | None = None
    num_tokens: int = 0
    trace: Path | None = None
    num_requests: int = 0

    @property
    def is_trace(self) -> bool:
        return self.batch is None

    def until_s(self, machine: Machine) -> float | None:
        if self.batch is None:
            return None
        prompt_lens = [min(round(text.prompt_len.median), machine.max_prompt_len) for text in machine.texts]
        prompts_s = sum(machine.cost.prefill_s(prompt_len, prompt_len) for prompt_len in prompt_lens) / len(prompt_lens)
        return self.batch * prompts_s + self.num_tokens / self.batch * machine.token_s(self.batch)

    def load(self, machine: Machine) -> Load:
        """The same requests at every call."""
        random = np.random.default_rng(crc32(self.name.encode()))
        if self.batch is not None:
            return Load(_closed(machine, random), self.batch)
        lens = trace_lens(self, machine, random)
        return Load(_requests(machine, random, scaled(machine, lens)))


def gpu_machine(name: str, drafter: str) -> Machine:
    """Of a scenario that is shipped; its families, with tokens that differ."""
    scenario = read_scenario(FOLDER / f"{name}.yaml")
    assert isinstance(scenario, ServingScenario)
    cost = scenario.cost(scenario.target)
    texts = tuple(
        Text(text.prompt_len, text.output_len, family=_with_token_spread(text.family, drafter))
        for text in scenario.texts.values()
    )
    spec = DrafterSpec(drafter, MAX_SEQUENCES, DRAFT_LEN)
    return Machine(name, cost, spec, texts, scenario.link_us * 1e-6, cost.target.kv_tokens() // 16)


def this_machine(cost: CostModel, config: DrafterConfig, members: Sequence[DrafterConfig], recording: Path) -> Machine:
    """``members``: of the cascade ``config``, as drafters of their own, which ``cost`` and the recording know."""
    lens = Lens(median=100, spread=0.5, least=16, most=512), Lens(median=128, spread=0.3, least=16, most=384)
    text = Text(*lens, recording=recording)
    one_row_s = cost.step_s(1, 0)

    def member(one: DrafterConfig) -> MemberSpec:
        draft_s = cost.draft_s(one.name, 1, DRAFT_LEN) if one.options.traits.has_model else 0.0
        assert draft_s is not None
        return MemberSpec(one.name, draft_s / one_row_s)

    drafter = DrafterSpec(
        config.name, MAX_SEQUENCES, DRAFT_LEN, companion=config.is_colocated, members=tuple(map(member, members))
    )
    return Machine("here", cost, drafter, (text,), max_prompt_len=512, max_output_len=256, chunk_len=256, measured=True)


def _with_token_spread(family: Family, drafter: str) -> Family:
    one = family.drafters[drafter].model_copy(update={"token_spread": TOKEN_SPREAD})
    return family.model_copy(update={"drafters": {drafter: one}})


def _closed(machine: Machine, random: np.random.Generator) -> Iterator[SimulatedRequest]:
    for number in count():
        text = machine.texts[number % len(machine.texts)]
        prompt_len = min(text.prompt_len.draw(random), machine.max_prompt_len)
        output_len = min(text.output_len.draw(random), machine.max_output_len)
        yield _request(machine, text, random, number, 0.0, prompt_len, output_len)


def _requests(
    machine: Machine, random: np.random.Generator, arrivals: Sequence[tuple[float, int, int]]
) -> Iterator[SimulatedRequest]:
    for number, (arrival_s, prompt_len, output_len) in enumerate(arrivals):
        text = machine.texts[int(random.integers(len(machine.texts)))]
        yield _request(machine, text, random, number, arrival_s, prompt_len, output_len)


def _request(
    machine: Machine,
    text: Text,
    random: np.random.Generator,
    number: int,
    arrival_s: float,
    prompt_len: int,
    output_len: int,
) -> SimulatedRequest:
    if text.family is not None:
        answer = text.family.answer(random, output_len, DRAFT_LEN)
        return SimulatedRequest(f"r{number}", arrival_s, prompt_len, output_len, answer)
    assert text.recording is not None
    recording = _recording(text.recording)
    names = [member.name for member in machine.drafter.members] or [machine.drafter.name]
    of = recording.answer(int(random.integers(len(recording))), names)
    answer = AgreementAnswer(of.output_len, of.by_drafter)
    return endless(SimulatedRequest(f"r{number}", arrival_s, prompt_len, output_len, answer), output_len)


def endless(request: SimulatedRequest, num_tokens: int) -> SimulatedRequest:
    """The same text over and over, its first token left out: a request whose drafters stay as good as they are."""
    answer = request.answer

    def again(agreement: Agreement) -> Agreement:
        num_times = -(-num_tokens // max(1, len(agreement.right) - 1))
        confidences = agreement.confidences
        if confidences is not None and len(confidences) > 1:
            confidences = np.tile(confidences[1:], (num_times, 1))
        part = slice(1, None) if len(agreement.right) > 1 else slice(None)
        return Agreement(agreement.drafted[part] * num_times, agreement.right[part] * num_times, confidences, agreement.flat)

    by_drafter = {name: again(agreement) for name, agreement in answer.by_drafter.items()}
    return replace(request, max_tokens=num_tokens, answer=AgreementAnswer(num_tokens, by_drafter))


@cache
def _recording(path: Path) -> AgreementRecording:
    return read_recording(path)


def trace_lens(workload: Workload, machine: Machine, random: np.random.Generator) -> list[tuple[float, int, int]]:
    """Arrival, prompt and output tokens, cut to the machine's limits."""
    if workload.trace is None:
        rows = _bursts(workload.num_requests, machine.texts[0], random)
    else:
        rows = list(read_trace(workload.trace))
    step = max(1, len(rows) // workload.num_requests)
    return [
        (at_s, min(prompt_len, machine.max_prompt_len), min(output_len, machine.max_output_len))
        for at_s, prompt_len, output_len in rows[::step][: workload.num_requests]
    ]


def _bursts(num: int, text: Text, random: np.random.Generator) -> list[tuple[float, int, int]]:
    """Poisson arrivals whose rate changes between 1 and 8, for phases of 40 requests on average."""
    rows: list[tuple[float, int, int]] = []
    now_s, rate = 0.0, 1.0
    while len(rows) < num:
        now_s += float(random.exponential(1.0 / rate))
        rows.append((now_s, text.prompt_len.draw(random), text.output_len.draw(random)))
        if random.random() < 1.0 / 40.0:
            rate = 9.0 - rate
    return rows


def scaled(
    machine: Machine, rows: Sequence[tuple[float, int, int]], load: float = TRACE_LOAD
) -> list[tuple[float, int, int]]:
    """The same arrivals in the time in which plain decoding at full batch could serve ``load`` of them."""
    token_s = machine.token_s(MAX_SEQUENCES) / MAX_SEQUENCES
    work_s = sum(machine.cost.prefill_s(prompt_len, 0) + output_len * token_s for _, prompt_len, output_len in rows)
    first_s, last_s = rows[0][0], rows[-1][0]
    factor = work_s / load / max(1e-9, last_s - first_s)
    return [(factor * (at_s - first_s), prompt_len, output_len) for at_s, prompt_len, output_len in rows]


def workloads(data: Path | None, quick: bool) -> tuple[Workload, ...]:
    # Loops that are shorter than several answers count prompts of new requests as a loss: faster arms begin more of them.
    per_request, least, num_requests = (400, 2000, 100) if quick else (600, 12_000, 1200)
    batches = (1, 4, 16, 64) if quick else BATCHES
    closed = [Workload(f"batch {batch}", batch, max(least, per_request * batch)) for batch in batches]
    folder = None if data is None else data / "traces"
    files = sorted(folder.glob("*_*.csv*")) if folder is not None else []
    files = [path for path in files if "rate" not in path.name]
    traces = [Workload(path.name.partition(".")[0], trace=path, num_requests=num_requests) for path in files]
    if quick:
        traces = [one for one in traces if one.name.startswith(("azure2023_conv", "servegen_mlarge"))]
    return (*closed, *(traces or [Workload(SYNTHETIC_TRACE, num_requests=num_requests)]))
