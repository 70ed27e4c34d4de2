"""On CUDA the noise and the choices are those of the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.sampling_params import SamplingParams
from engine.noise import gumbel, noise_keys
from engine.sampling import Sampler, SampleSpan, SamplingState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLAIN = SamplingParams(max_tokens=64)


def test_noise_is_the_same_on_both() -> None:
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(noise_keys(rng.integers(0, 2**64, 64, np.uint64), rng.integers(0, 2**20, 64)))[:, None]
    token_ids = torch.arange(150_000)
    assert torch.equal(gumbel(keys.cuda(), token_ids.cuda()).cpu(), gumbel(keys, token_ids))


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        replace(PLAIN, temperature=0.0),
        replace(PLAIN, top_p=0.9),
        replace(PLAIN, top_k=20, top_p=0.8, min_p=0.02),
        replace(PLAIN, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=((3, 2.0),), min_tokens=3),
    ],
)
def test_choices_are_the_same_on_both(sampling: SamplingParams) -> None:
    logits = 3 * torch.randn(200, 50_001, generator=torch.Generator().manual_seed(0))
    spans = [SampleSpan(SamplingState(replace(sampling, seed=seed), [1, 2, 3], 2), (4, 5, 6), 4) for seed in range(50)]
    sampler = Sampler(50_001, (7,))
    on_cpu, on_gpu = (sampler.choose(x, spans, want_confidences=True) for x in (logits, logits.cuda()))
    assert [chosen.token_ids for chosen in on_gpu] == [chosen.token_ids for chosen in on_cpu]
    for left, right in zip(on_gpu, on_cpu, strict=True):
        assert left.confidences == pytest.approx(right.confidences, rel=1e-4)
