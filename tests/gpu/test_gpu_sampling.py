"""On CUDA the noise and the choices are those of the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.sampling_params import SamplingParams
from engine.factory import make_gumbel_argmax
from engine.noise import gumbel, noise_keys
from engine.sampling import Sampler, SampleSpan, SamplingState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLAIN = SamplingParams(max_tokens=64)
CUDA = torch.device("cuda")


def test_noise_is_the_same_on_both() -> None:
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(noise_keys(rng.integers(0, 2**64, 64, np.uint64), rng.integers(0, 2**20, 64)))[:, None]
    token_ids = torch.arange(150_000)
    assert torch.equal(gumbel(keys.cuda(), token_ids.cuda()).cpu(), gumbel(keys, token_ids))


EDITED = replace(PLAIN, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1, logit_bias=((3, 2.0),))
SAMPLINGS = [
    PLAIN,
    replace(PLAIN, temperature=0.0),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_p=0.999, temperature=2.0),
    replace(PLAIN, top_k=20, top_p=0.8, min_p=0.02),
    replace(EDITED, min_tokens=3, bad_words=((9,), (5, 11))),
    replace(EDITED, temperature=0.0, allowed_token_ids=tuple(range(0, 4000, 3))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_choices_are_the_same_on_both(sampling: SamplingParams, fused: bool, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(200, 50_001, generator=torch.Generator().manual_seed(0))).to(dtype)
    spans = [SampleSpan(SamplingState(replace(sampling, seed=seed), [1, 2, 3], 2), (4, 5, 6), 4) for seed in range(50)]
    kernel = make_gumbel_argmax(50_001, dtype, CUDA) if fused else None
    assert kernel is not None or not fused, "the kernels cannot be compiled"
    on_cpu = Sampler(50_001, (7,)).choose(logits, spans, want_confidences=True)
    on_gpu = Sampler(50_001, (7,), kernel).choose(logits.cuda(), spans, want_confidences=True)
    assert [chosen.token_ids for chosen in on_gpu] == [chosen.token_ids for chosen in on_cpu]
    for left, right in zip(on_gpu, on_cpu, strict=True):
        assert left.confidences == pytest.approx(right.confidences, rel=1e-4)


def test_the_kernels_wait_for_the_device_once_and_on_purpose() -> None:
    sampler = Sampler(50_001, (7,), make_gumbel_argmax(50_001, torch.float32, CUDA))
    states = [SamplingState(replace(sampling, seed=1), [1, 2, 3], 2) for sampling in SAMPLINGS]
    spans = [SampleSpan(state, (), 1) for state in states]
    logits = torch.randn(len(spans), 50_001, device=CUDA)
    expected = sampler.choose(logits, spans)  # compiles and allocates
    torch.cuda.set_sync_debug_mode("error")  # raises at any wait but an explicit one
    try:
        assert sampler.choose(logits, spans) == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
