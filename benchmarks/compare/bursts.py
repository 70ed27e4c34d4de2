"""Requests that arrive in bursts: a slice of a recorded trace, or made up. The client is aiperf where it is installed."""

import csv
import gzip
import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.arms import PeerMissing
from benchmarks.compare.peer_server import PeerFailed
from benchmarks.compare.systems import ROOT, RunningArm
from benchmarks.compare.turns import Turn, awake
from benchmarks.load import LoadRequest

TRACE = Path("traces/servegen_mlarge_h155.2.csv.gz")  # 25 clients of a production model; peak over valley 15.7
AIPERF_S = 600.0
BURST_S, CALM_S = 3.0, 6.0  # of made-up arrivals, in turns
BURST_OVER_CALM = 8.0  # rate of arrivals


def trace_arrivals(data: Path, num_requests: int, mean_rate: float) -> list[float]:
    """Seconds of ``num_requests`` arrivals round the busiest moment of TRACE, stretched to ``mean_rate`` a second."""
    with gzip.open(data / TRACE, "rt", encoding="utf-8") as file:
        arrivals = [float(row["arrival_s"]) for row in csv.DictReader(file)]
    return bursty_slice(arrivals, num_requests, mean_rate)[1]


def bursty_slice(arrivals: Sequence[float], num_requests: int, mean_rate: float) -> tuple[int, list[float]]:
    """The slice with the widest swing: its busiest tenth takes the least of its time. The number of its first arrival, and
    the arrivals from 0 on, stretched to ``mean_rate`` a second. ``arrivals``: at least ``num_requests``, two or more."""
    tenth = max(1, num_requests // 10)
    starts = range(0, max(1, len(arrivals) - num_requests), tenth)

    def swing(start: int) -> float:
        cut = arrivals[start : start + num_requests]
        return min(cut[i + tenth] - cut[i] for i in range(num_requests - tenth)) / (cut[-1] - cut[0])

    first = min(starts, key=swing)
    cut = arrivals[first : first + num_requests]
    stretch = num_requests / mean_rate / (cut[-1] - cut[0])
    return first, [(at_s - cut[0]) * stretch for at_s in cut]


def bursty_arrivals(num_requests: int, mean_rate: float, seed: int) -> list[float]:
    """Poisson arrivals whose rate is high for BURST_S and low for CALM_S, in turns; on average ``mean_rate`` a second."""
    rng = random.Random(seed)
    calm_rate = mean_rate * (BURST_S + CALM_S) / (BURST_OVER_CALM * BURST_S + CALM_S)
    at_s, arrivals = 0.0, list[float]()
    while len(arrivals) < num_requests:
        phase_s = at_s % (BURST_S + CALM_S)
        in_burst = phase_s < BURST_S
        gap_s = rng.expovariate(calm_rate * (BURST_OVER_CALM if in_burst else 1.0))
        left_s = (BURST_S if in_burst else BURST_S + CALM_S) - phase_s
        if gap_s > left_s:  # the rate changes before the next one comes: begin anew there, which a Poisson process allows
            at_s += left_s
            continue
        at_s += gap_s
        arrivals.append(at_s)
    return arrivals


def aiperf_program() -> Path | None:
    program = ROOT / ".venv-aiperf" / "bin" / "aiperf"
    return program if program.exists() else None


def aiperf_turn(
    program: Path, arm: RunningArm, asks: Sequence[LoadRequest], arrivals_s: Sequence[float], tokenizer: Path, folder: Path
) -> Turn:
    """Each request is sent at its time by aiperf, whatever is under way; its figures of each request.

    Raises:
        PeerFailed: aiperf failed, or a request was not answered.
        PeerMissing: ``program`` cannot be run.
    """
    folder.mkdir(parents=True)
    target = arm.target
    trace = folder / "trace.jsonl"
    trace.write_text(aiperf_trace(arm, asks, arrivals_s), encoding="utf-8")
    command = [
        *(str(program), "profile", "--model", target.model, "--url", f"http://{target.host}:{target.port}"),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(tokenizer), "--ui", "none"),
        *("--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--use-server-token-count", "--workers-max", "1", "--profile-export-level", "records"),
        *("--artifact-dir", str(folder)),
    ]
    # HF_HUB_OFFLINE would make aiperf 0.13 take the folder for the name of a repository. It is read without a network.
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with awake(arm):
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=AIPERF_S, check=False)
        except OSError as error:
            raise PeerMissing(f"{program}: {error}") from error
    records = folder / "profile_export.jsonl"
    if done.returncode != 0 or not records.exists():
        raise PeerFailed(f"aiperf on {arm.arm.name}: {(done.stdout + done.stderr)[-1500:]}")
    return read_records(arm.arm.name, records.read_text(encoding="utf-8"), len(asks))


def aiperf_trace(arm: RunningArm, asks: Sequence[LoadRequest], arrivals_s: Sequence[float]) -> str:
    """The requests with their times, as aiperf reads them."""
    lines = []
    for ask, at_s in zip(asks, arrivals_s, strict=True):
        payload = arm.target.body(replace(ask, drafting=arm.arm.request_drafting))
        lines.append(json.dumps({"timestamp": round(1e3 * at_s, 3), "payload": payload}) + "\n")
    return "".join(lines)


def read_records(arm: str, text: str, num_asked: int) -> Turn:
    """aiperf's export by request. Raises PeerFailed unless each of ``num_asked`` was answered."""
    tpot_s, ttft_s, num_tokens, begin_ns, end_ns = [], [], 0, [], []
    for line in text.splitlines():
        record = json.loads(line)
        metrics, times = record["metrics"], record["metadata"]
        if record.get("error") or "inter_token_latency" not in metrics:
            raise PeerFailed(f"aiperf on {arm}: {record.get('error') or 'an answer of one token'}")
        tpot_s.append(metrics["inter_token_latency"]["value"] / 1e3)
        ttft_s.append(metrics["time_to_first_token"]["value"] / 1e3)
        num_tokens += int(metrics["output_sequence_length"]["value"])
        begin_ns.append(times["request_start_ns"])
        end_ns.append(times["request_end_ns"])
    if len(tpot_s) != num_asked:
        raise PeerFailed(f"aiperf on {arm}: {len(tpot_s)} of {num_asked} requests were answered")
    return Turn(num_tokens / ((max(end_ns) - min(begin_ns)) / 1e9), tuple(tpot_s), tuple(ttft_s), ())
