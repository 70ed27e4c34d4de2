"""The memory of a KV cache."""

import resource

import torch

from engine.kv_cache import cache_zeros

NUM_BYTES = 128 * 2**20  # 64 huge pages


def test_the_pages_of_a_new_cache_are_there_so_that_no_pass_waits_for_them() -> None:
    cache = cache_zeros((NUM_BYTES // 2,), torch.bfloat16, torch.device("cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 32
