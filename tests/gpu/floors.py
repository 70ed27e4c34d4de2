"""Times on a device, each beside a floor: the bytes that must be read and written, at the rate of a copy there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from engine.device import synchronize
from engine.models.config import DecoderConfig, RopeConfig
from engine.target import TargetEngine
from engine.target_probe import TargetProbe
from profiler.interleaved import OwnTime

# Of Llama 3.2 1B, and one that is interpreted quickly.
MODEL = DecoderConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    rope=RopeConfig(500_000.0),
    max_len=40_000,
    tied_embeddings=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(0,),
)
TINY = replace(
    MODEL,
    vocab_size=130,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_len=256,
)


class Timings:
    """Appends to ``found`` as it measures, so that an error leaves what was measured before."""

    def __init__(self, device: torch.device, found: list[dict[str, Any]]) -> None:
        self._device, self._found = device, found
        size = 2**28 if device.type == "cuda" else 2**16
        source, target = (torch.empty(size, device=device) for _ in range(2))
        ms = self._kernel_ms(lambda: torch.add(source, 1.0, out=target))
        self._bytes_per_ms = 8 * size / ms
        self.add(f"copy of {4 * size >> 20} MiB, {self._bytes_per_ms / 1e6:.0f} GB/s", ms, 8 * size)

    def kernel(self, name: str, num_bytes: float | None, launch: Callable[[], object]) -> None:
        self.add(name, self._kernel_ms(launch), num_bytes)

    def wall(self, name: str, num_bytes: float | None, compute: Callable[[], object]) -> None:
        """With the work of the host."""
        self.add(name, self._wall_ms(compute), num_bytes)

    def add(self, name: str, ms: float, num_bytes: float | None) -> None:
        floor_ms = None if num_bytes is None else num_bytes / self._bytes_per_ms
        self._found.append({"name": name, "ms": ms, "floor_ms": floor_ms})
        print(f"{name}: {ms:.4f} ms" + ("" if floor_ms is None else f", floor {floor_ms:.4f} ms"), flush=True)

    def _kernel_ms(self, launch: Callable[[], object]) -> float:
        """Median time of what ``launch`` launches, with cold caches."""
        if self._device.type == "cpu":
            return self._wall_ms(launch)
        from triton.testing import do_bench

        found: float = do_bench(launch, warmup=20, rep=60, return_mode="median")
        return found

    def _wall_ms(self, compute: Callable[[], object]) -> float:
        """Median time from the call until the device has finished, without the first, which compiles and captures."""
        times = []
        for _ in range(2 if self._device.type == "cpu" else 21):
            synchronize(self._device)
            start_s = time.perf_counter()
            compute()
            synchronize(self._device)
            times.append(1e3 * (time.perf_counter() - start_s))
        return median(times[1:])


def weight_bytes(config: DecoderConfig, element_bytes: int) -> int:
    """Of what a pass reads: all but the embedding, of which the head is the same matrix."""
    c = config
    of_layer = c.hidden_size * (2 * c.q_size + 2 * c.kv_size + 3 * c.intermediate_size)
    return element_bytes * (c.num_layers * of_layer + c.vocab_size * c.hidden_size)


def steps(timings: Timings, target: TargetEngine, sizes: Sequence[int], num_bytes: float) -> None:
    """Whole passes of a target, sampling included, without context."""
    probe = TargetProbe(target, OwnTime())
    for num_rows in sizes:
        times = [1e3 * probe.step(num_rows, 0) for _ in range(2 if num_rows == sizes[-1] == 1 else 12)]
        timings.add(f"target's step, {num_rows} rows", median(times[1:]), num_bytes)
