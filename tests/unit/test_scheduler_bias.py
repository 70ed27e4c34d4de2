"""DSpark's appendix A: a scheduler that looks at later tokens biases a rejection sampler, and cannot bias ours.

A drafter proposes x1 from (0.5, 0.5) for a target of (0.7, 0.3), which accepts it with probability 0.8. The confidence of
the token after it depends on x1: 0.9 after A, 0 after B. By the paper's costs no draft pays alone and two pay together, so a
scheduler that searches on verifies x1 only if it is A, and the first token of the output is A with probability 0.85."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from cluster.sampling_params import SamplingParams
from engine.acceptance import accept
from engine.sampling import Sampler, SampleSpan, SamplingState
from router.cost_model import TableCost
from router.drafting.policies import VERIFICATION_POLICIES
from router.drafting.verification import PassContext, PassRows, VerificationPolicy
from router.plan import SequenceView, Span
from tests.support.verification import a_pass, decoding

A, B = 0, 1
TARGET, DRAFTER = (0.7, 0.3), (0.5, 0.5)
ACCEPTANCE = 0.8  # sum of min(TARGET, DRAFTER)
CONFIDENCE_AFTER = {A: 0.9, B: 0.0}
COST = TableCost((1, 2, 3), (1.0, 1 / 0.5, 1 / 0.45))
PROMPT = (A,)
NUM_REQUESTS = 3_000
SOUND, BROKEN = 1e-4, 1e-9  # p-values, as in test_distribution


class SeesTheDrafts:
    """Worse than the paper's: verifies a proposal only if its first token is A."""

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        return PassRows([s.num_drafted * (s.survival[1] > 0.0) for s in ready], 0)


def policy(name: str) -> VerificationPolicy:
    return SeesTheDrafts() if name == "sees-the-drafts" else VERIFICATION_POLICIES[name]()


def num_verified(scheduler: VerificationPolicy, first_draft: int) -> int:
    survival = (ACCEPTANCE, ACCEPTANCE * CONFIDENCE_AFTER[first_draft])
    return scheduler.rows([decoding("r", survival)], a_pass(COST)).verify_lens[0]


def by_rejection(name: str) -> list[int]:
    """First tokens of requests by speculative sampling (Leviathan et al. 2023): accept with probability min(1, p / q)."""
    rng, scheduler = np.random.default_rng(7), policy(name)
    p, q = np.array(TARGET), np.array(DRAFTER)
    residual = np.maximum(p - q, 0.0) / np.maximum(p - q, 0.0).sum()
    tokens = []
    for _ in range(NUM_REQUESTS):
        draft = int(rng.choice(2, p=q))
        if not num_verified(scheduler, draft):
            tokens.append(int(rng.choice(2, p=p)))
        elif rng.random() < p[draft] / q[draft]:
            tokens.append(draft)
        else:
            tokens.append(int(rng.choice(2, p=residual)))
    return tokens


def by_shared_noise(name: str) -> list[int]:
    """First tokens of the same requests by Outrider's rule: a draft is accepted if it is the target's own token."""
    sampler, scheduler = Sampler(2, ()), policy(name)
    states = [SamplingState(SamplingParams(max_tokens=9, seed=i), PROMPT, 1) for i in range(NUM_REQUESTS)]
    drafted = sampler.choose(logits(DRAFTER, NUM_REQUESTS), [SampleSpan(state, (), 1) for state in states])
    drafts = [(chosen.token_ids[0], B)[: num_verified(scheduler, chosen.token_ids[0])] for chosen in drafted]
    spans = [SampleSpan(state, draft, len(draft) + 1) for state, draft in zip(states, drafts, strict=True)]
    chosen = sampler.choose(logits(TARGET, sum(span.num_rows for span in spans)), spans)
    outcomes = [Span("r", 1, len(draft)) for draft in drafts]
    for outcome, draft, one in zip(outcomes, drafts, chosen, strict=True):
        accept(outcome, draft, one)
    return [outcome.chosen[0] for outcome in outcomes]


def logits(probabilities: Sequence[float], num_rows: int) -> torch.Tensor:
    return torch.tensor(probabilities).log().expand(num_rows, -1).contiguous()


def p_value(tokens: Sequence[int]) -> float:
    counts = np.bincount(tokens, minlength=2)
    return float(stats.chisquare(counts, len(tokens) * np.array(TARGET)).pvalue)


@pytest.mark.parametrize("name", ["outrider", "sees-the-drafts"])
def test_a_rejection_sampler_is_biased_by_a_scheduler_that_looks_at_later_tokens(name: str) -> None:
    tokens = by_rejection(name)
    assert p_value(tokens) < BROKEN
    assert tokens.count(A) / len(tokens) == pytest.approx(0.85, abs=0.02)


@pytest.mark.parametrize("name", ["all", "dspark", "dspark-async"])
def test_a_rejection_sampler_is_sound_under_a_scheduler_that_does_not(name: str) -> None:
    assert p_value(by_rejection(name)) > SOUND


@pytest.mark.parametrize("name", ["outrider", "sees-the-drafts", "all", "dspark", "adaspec"])
def test_outriders_rule_is_sound_under_every_scheduler(name: str) -> None:
    tokens = by_shared_noise(name)
    assert p_value(tokens) > SOUND
    assert tokens == by_shared_noise("dspark"), "which verifies nothing here: no token differs from plain decoding"


def test_the_adversary_verifies_by_content() -> None:
    """Else the tests above would prove nothing."""
    assert [num_verified(policy("outrider"), draft) for draft in (A, B)] == [2, 0]
    assert [num_verified(policy("sees-the-drafts"), draft) for draft in (A, B)] == [2, 0]
    assert [num_verified(policy("dspark"), draft) for draft in (A, B)] == [0, 0]
