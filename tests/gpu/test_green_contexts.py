"""Green Contexts on the device: two threads compute in their parts at the same time, and compute the same."""

import pytest
import torch

from engine.partition import GreenContext, green_contexts
from engine.threads import in_own_thread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_products_in_a_part_equal_those_on_the_whole_device_and_take_longer() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")
    torch.cuda.init()
    num_all = torch.cuda.get_device_properties(0).multi_processor_count
    target, drafter = green_contexts(num_all // 2)
    assert target.num_multiprocessors + drafter.num_multiprocessors <= num_all == target.num_all
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def product(part: GreenContext | None) -> tuple[torch.Tensor, float]:
        if part is not None:
            part.enter()
        x @ x  # warms up
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        found = x @ x
        end.record()
        end.synchronize()
        return found, start.elapsed_time(end)

    whole, whole_ms = in_own_thread(lambda: product(None))
    for part in (target, drafter):
        found, part_ms = in_own_thread(lambda part=part: product(part))
        torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-1)
        assert part_ms > 1.2 * whole_ms, "half of the multiprocessors are as fast as all: the part was not entered"
