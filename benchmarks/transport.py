"""Round trips between two processes over each transport, and the time to encode a round."""

import statistics
import time
from collections.abc import Callable

from benchmarks.report import BenchOptions, BenchResult, Table
from cluster.interpreter import SWITCH_S
from cluster.transport.codec import decode, encode
from profiler.transport_probe import down_round, round_trips, up_round

NUM_TURNS, NUM_TURNS_QUICK = 20, 8  # per transport, alternating, so that noise affects all alike
ROUND_SIZES = (1, 32, 256)


def run(options: BenchOptions) -> BenchResult:
    num_turns = NUM_TURNS_QUICK if options.quick else NUM_TURNS
    times = round_trips(num_turns, beside_python=True)
    codec = {num_requests: _codec_us(num_requests) for num_requests in ROUND_SIZES}
    figures: dict[str, float] = {}
    for name, trips_s in times.items():
        figures[f"{name}_p50_us"] = 1e6 * statistics.median(trips_s)
        figures[f"{name}_p99_us"] = 1e6 * statistics.quantiles(trips_s, n=100)[-1]
    for num_requests, (encode_us, decode_us) in codec.items():
        figures[f"encode_us.requests_{num_requests}"] = encode_us
        figures[f"decode_us.requests_{num_requests}"] = decode_us
    rows = tuple((name, figures[f"{name}_p50_us"], figures[f"{name}_p99_us"], len(trips)) for name, trips in times.items())
    return BenchResult(
        "transport",
        figures,
        tables=(Table("round trips between two processes", ("what", "p50 us", "p99 us", "trips"), rows),),
        notes=(
            "encode_us and decode_us: one round each way, summed over both directions",
            f"busy: rounds of 32 requests until the answer is in the mailbox, while the sender computes in Python; threads "
            f"switch after {1e3 * SWITCH_S:g} ms, as in processes that serve. busy_default: after Python's 5 ms",
        ),
    )


def _codec_us(num_requests: int) -> tuple[float, float]:
    """Microseconds to encode, and to decode, one round in both directions."""
    down = down_round(num_requests)
    messages = (down, up_round(down))
    frames = [encode(message) for message in messages]
    return (
        1e6 * _best_s(lambda: [encode(message) for message in messages]),
        1e6 * _best_s(lambda: [decode(frame) for frame in frames]),
    )


def _best_s(function: Callable[[], object]) -> float:
    samples: list[float] = []
    for _ in range(200):
        start_s = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start_s)
    return min(samples)
