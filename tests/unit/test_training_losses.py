"""Losses and acceptance, each against its plain definition."""

import math

import pytest
import torch

from drafters.hidden_states.block_network import output_rows
from drafters.replay import Round
from training.evaluation import acceptance
from training.losses import TargetDistribution, distillation, position_weights


def distribution(logits: torch.Tensor) -> TargetDistribution:
    return TargetDistribution(logits, logits.logsumexp(-1), torch.arange(len(logits)))


def test_total_variation_counts_what_cannot_be_drafted_as_lost() -> None:
    torch.manual_seed(1)
    full, z = torch.randn(5, 11), torch.randn(5, 4)
    vocabulary = torch.tensor([1, 4, 5, 9])
    places = output_rows(vocabulary, 11, outside=-1)[torch.tensor([4, 0, 9, 5, 10])]
    target = TargetDistribution(full[:, vocabulary], full.logsumexp(-1), torch.arange(5))
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25, 1.0])
    found = distillation(z, target, places, weights, progress=1.0)
    q = torch.zeros(5, 11)
    q[:, vocabulary] = z.softmax(-1)
    distance = (q - full.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(found.acceptance, 1 - distance / 2)
    torch.testing.assert_close(found.match, (weights * distance).sum() / 3.0)
    inside = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    own = z.log_softmax(-1).gather(1, places.clamp_min(0)[:, None]).squeeze(1)
    cross_entropy = -(weights * inside * own).sum() / 3.0
    torch.testing.assert_close(found.total, 0.1 * cross_entropy + 0.9 * found.match)


def test_the_match_anneals_from_divergence_to_variation() -> None:
    torch.manual_seed(2)
    z, target = torch.randn(3, 6), distribution(torch.randn(3, 6))
    places, weights = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    at = {p: float(distillation(z, target, places, weights, p).total) for p in (0.0, 0.15, 0.3, 1.0)}
    divergence = -(target.log_probs(slice(None)).exp() * z.log_softmax(-1)).sum(-1).mean()
    cross_entropy = -z.log_softmax(-1)[:, 0].mean()
    assert at[0.0] == pytest.approx(float(0.1 * cross_entropy + 0.9 * divergence), rel=1e-5)
    assert at[0.15] == pytest.approx((at[0.0] + at[1.0]) / 2, rel=1e-5)
    assert at[0.3] == at[1.0]


@pytest.mark.parametrize("progress", [0.0, 0.2, 1.0])
def test_gradients_equal_those_of_autograd(progress: float) -> None:
    """For more rows than are computed at once, some of which share the target's."""
    torch.manual_seed(4)
    num, size = 75, 13
    full, rows = torch.randn(20, 17), torch.randint(0, 20, (num,))
    target = TargetDistribution(full[:, :size], full.logsumexp(-1), rows)
    places, weights = torch.randint(-1, size, (num,)), torch.rand(num)
    z = torch.randn(num, size, requires_grad=True)
    plain = z.detach().clone().requires_grad_()
    log_q, p = plain.log_softmax(-1), target.log_probs(slice(None)).exp()
    scale, annealed = weights / weights.sum(), min(1.0, progress / 0.3)
    own = log_q.gather(1, places.clamp_min(0)[:, None]).squeeze(1)
    variation = 2 * (1 - torch.minimum(p, log_q.exp()).sum(-1))
    match = annealed * variation - (1 - annealed) * (p * log_q).sum(-1)
    expected = (scale * (0.9 * match - 0.1 * (places >= 0) * own)).sum()
    found = distillation(z, target, places, weights, progress).total
    torch.testing.assert_close(found, expected)
    (3.0 * found).backward()
    (3.0 * expected).backward()
    torch.testing.assert_close(z.grad, plain.grad, rtol=1e-4, atol=1e-7)


def test_the_confidence_loss_is_minimal_at_the_expected_acceptance() -> None:
    torch.manual_seed(3)
    z, target = torch.randn(2, 6), distribution(torch.randn(2, 6))
    label = distillation(z, target, torch.zeros(2, dtype=torch.int64), torch.ones(2), 1.0).acceptance
    confidence = torch.logit(label).requires_grad_()
    found = distillation(z, target, torch.zeros(2, dtype=torch.int64), torch.ones(2), 1.0, confidence)
    found.total.backward()
    assert confidence.grad is not None
    assert confidence.grad.abs().max() < 1e-6  # the label itself is where the loss is least


def test_early_positions_weigh_most() -> None:
    assert position_weights(7).tolist() == pytest.approx([math.exp(-k / 7) for k in range(7)])


def test_acceptance_is_conditional_by_position() -> None:
    rounds = [Round("a", (0.5,) * 3, 3, 4), Round("a", (0.5,) * 3, 1, 2), Round("b", (0.5,) * 3, 0, 1), Round("b", (), 0, 1)]
    found = acceptance(rounds, 3, 0.0)
    assert found.accepted_len == 2.0
    assert found.by_position == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert found.by_domain == {"a": 3.0, "b": 1.0}
