"""Whatever is drafted, sequences have the target's joint distribution; and this test would see if they had not.

A toy target gives logits by the last two tokens, so the probability of every sequence is known. Thousands of requests that
differ by their seed alone run as one batch through the sampler and the rule of acceptance."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from cluster.sampling_params import SamplingParams
from engine.acceptance import accept, common_prefix_len
from engine.sampling import Chosen, Sampler, SampleSpan, SamplingState
from router.plan import Span
from tests.support.quick import first

pytestmark = pytest.mark.slow  # together they take seconds

VOCAB_SIZE = 9
LENGTH = 3  # of the sequences whose distribution is tested: 729 of them
NUM_REQUESTS = 6_000
PROMPT = (4, 2)
SOUND = 1e-4  # p-values: sound rules stay above, broken ones fall far below
BROKEN = 1e-9

SAMPLER = Sampler(VOCAB_SIZE, ())
LOGITS = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
OTHER_LOGITS = LOGITS + 0.8 * torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(1))  # of a drafter

State = Callable[[SamplingParams], SamplingState]
Drafts = list[tuple[int, ...]]
Drafter = Callable[[list[SamplingState], Drafts], Drafts]  # of states and the tokens after the prompt: up to two drafts each
Rule = Callable[[Span, tuple[int, ...], Chosen], None]


def logits_after(table: torch.Tensor, contexts: list[tuple[int, ...]]) -> torch.Tensor:
    return table[[context[-2] for context in contexts], [context[-1] for context in contexts]]


def sample_ahead(table: torch.Tensor, states: list[SamplingState], outputs: Drafts, num: int = 2) -> Drafts:
    """What a drafter proposes that samples from ``table`` with the requests' own noise."""
    drafts: Drafts = [() for _ in states]
    for _ in range(num):
        rows = logits_after(table, [PROMPT + output + draft for output, draft in zip(outputs, drafts, strict=True)])
        spans = [SampleSpan(state, draft, 1) for state, draft in zip(states, drafts, strict=True)]
        drafts = [draft + c.token_ids for draft, c in zip(drafts, SAMPLER.choose(rows, spans), strict=True)]
    return drafts


def no_drafts(states: list[SamplingState], outputs: Drafts) -> Drafts:
    return [()] * len(states)


def perfect(states: list[SamplingState], outputs: Drafts) -> Drafts:
    return sample_ahead(LOGITS, states, outputs)


def shared_noise(states: list[SamplingState], outputs: Drafts) -> Drafts:
    return sample_ahead(OTHER_LOGITS, states, outputs)


def bad(states: list[SamplingState], outputs: Drafts) -> Drafts:
    return [tuple(draft) for draft in np.random.default_rng(2).integers(0, VOCAB_SIZE, (len(states), 2)).tolist()]


def one_hot(states: list[SamplingState], outputs: Drafts) -> Drafts:
    return [(int(row.argmax()),) for row in logits_after(OTHER_LOGITS, [PROMPT + output for output in outputs])]


def dropping_by_content(states: list[SamplingState], outputs: Drafts) -> Drafts:
    """An adversary that knows what the target will say and drafts it only if it is an even token. Where drafts that are
    accepted with some probability are dropped like this, the output leans towards odd tokens."""
    return [draft if draft[0] % 2 == 0 else () for draft in sample_ahead(LOGITS, states, outputs)]


DRAFTERS = [no_drafts, perfect, shared_noise, bad, one_hot, dropping_by_content]


def sequences(
    drafter: Drafter,
    first_seed: int,
    rule: Rule = accept,
    state_type: type[SamplingState] = SamplingState,
    num_requests: int = NUM_REQUESTS,
) -> NDArray[np.int64]:
    """(num_requests, LENGTH) tokens."""
    seeds = range(first_seed, first_seed + num_requests)
    states = [state_type(SamplingParams(max_tokens=9, seed=seed), PROMPT, len(PROMPT)) for seed in seeds]
    outputs: Drafts = [() for _ in states]
    live = list(range(num_requests))
    while live:
        all_drafts = drafter([states[i] for i in live], [outputs[i] for i in live])
        contexts = [
            PROMPT + outputs[i] + drafts[:n]
            for i, drafts in zip(live, all_drafts, strict=True)
            for n in range(len(drafts) + 1)
        ]
        spans = [SampleSpan(states[i], drafts, len(drafts) + 1) for i, drafts in zip(live, all_drafts, strict=True)]
        for i, drafts, chosen in zip(live, all_drafts, SAMPLER.choose(logits_after(LOGITS, contexts), spans), strict=True):
            span = Span(str(i), 1, len(drafts))
            rule(span, drafts, chosen)
            states[i].extend(span.chosen)
            outputs[i] += span.chosen
        live = [i for i in live if len(outputs[i]) < LENGTH]
    return np.array([output[:LENGTH] for output in outputs])


def p_value(tokens: NDArray[np.int64]) -> float:
    """Of a chi-square test against the target's joint distribution; sequences too rare for it are taken together."""
    probabilities = LOGITS.double().softmax(-1).numpy()
    first = probabilities[PROMPT]
    second = probabilities[PROMPT[1]]
    joint = (first[:, None, None] * second[:, :, None] * probabilities).ravel() * len(tokens)
    counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), (VOCAB_SIZE,) * LENGTH), minlength=len(joint))
    common = joint >= 5
    return float(
        stats.chisquare(
            np.append(counts[common], counts[~common].sum()), np.append(joint[common], joint[~common].sum())
        ).pvalue
    )


@pytest.mark.parametrize("drafter", first(3, DRAFTERS))
def test_sequences_have_the_targets_distribution(drafter: Drafter) -> None:
    assert p_value(sequences(drafter, first_seed=100_000 * DRAFTERS.index(drafter))) > SOUND


@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_the_drafter_does_not_change_a_single_token(drafter: Drafter) -> None:
    np.testing.assert_array_equal(sequences(drafter, 0, num_requests=2000), sequences(no_drafts, 0, num_requests=2000))


def test_drafting_with_the_requests_noise_agrees_more_often_than_without() -> None:
    """Else sharing noise would be for nothing, and the tests above would not see many accepted drafts."""
    states = [SamplingState(SamplingParams(max_tokens=9, seed=seed), PROMPT, len(PROMPT)) for seed in range(NUM_REQUESTS)]
    outputs: Drafts = [()] * NUM_REQUESTS
    target = [tokens[0] for tokens in perfect(states, outputs)]
    agreement = {
        drafter: np.mean([draft[0] == token for draft, token in zip(drafter(states, outputs), target, strict=True)])
        for drafter in (shared_noise, one_hot, bad)
    }
    p, q = (logits_after(table, [PROMPT])[0].double().softmax(-1).numpy() for table in (LOGITS, OTHER_LOGITS))
    expected = (1 / np.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None]).sum(1)).sum()
    assert agreement[shared_noise] == pytest.approx(expected, abs=0.02)
    assert agreement[shared_noise] > agreement[one_hot] + 0.1 > agreement[bad] + 0.1


def accept_by_chance(span: Span, drafts: tuple[int, ...], chosen: Chosen) -> None:
    """Broken: also accepts every fifth draft token, whatever the target says."""
    kept = tuple(
        draft if (int(span.request_id) + i) % 5 == 0 else token
        for i, (draft, token) in enumerate(zip(drafts, chosen.token_ids, strict=False))
    )
    accept(span, drafts, Chosen((*kept, *chosen.token_ids[len(kept) :])))


def accept_one_too_many(span: Span, drafts: tuple[int, ...], chosen: Chosen) -> None:
    """Broken: commits the row behind the rejected draft token, which was computed from a wrong history."""
    accept(span, drafts, chosen)
    span.chosen = chosen.token_ids[: span.num_accepted + 2]


class NoiseSharedBetweenPositions(SamplingState):
    """Broken: every position has the noise of position 0."""

    def __len__(self) -> int:
        return 0


def test_accepting_by_chance_is_seen() -> None:
    assert p_value(sequences(bad, 0, rule=accept_by_chance)) < BROKEN


def test_accepting_one_too_many_is_seen() -> None:
    assert p_value(sequences(bad, 0, rule=accept_one_too_many)) < BROKEN


def test_noise_shared_between_positions_is_seen() -> None:
    assert p_value(sequences(no_drafts, 0, state_type=NoiseSharedBetweenPositions)) < BROKEN


def test_drafts_dropped_by_content_are_seen_where_acceptance_is_random() -> None:
    """Broken: the adversary with a rule that takes its word for half of the requests."""

    def trusting(span: Span, drafts: tuple[int, ...], chosen: Chosen) -> None:
        if drafts and int(span.request_id) % 2:
            span.chosen, span.num_accepted = drafts, len(drafts)
        else:
            accept(span, drafts, chosen)

    def dropping(states: list[SamplingState], outputs: Drafts) -> Drafts:
        return [draft if draft[0] % 2 == 0 else () for draft in shared_noise(states, outputs)]

    assert p_value(sequences(dropping, 0, rule=trusting)) < BROKEN


# ---- what is accepted of a draft: the tokens that equal the target's own, and nothing behind the first that does not


def accepted(drafts: tuple[int, ...], chosen: Chosen) -> Span:
    span = Span("r", 1, len(drafts))
    accept(span, drafts, chosen)
    return span


def test_a_verdict_ends_with_the_first_token_that_was_not_drafted() -> None:
    chosen = Chosen((5, 6, 7))
    assert [common_prefix_len(drafts, chosen.token_ids) for drafts in [(5, 6), (5, 9), (9, 6)]] == [2, 1, 0]
    assert accepted((5, 6), chosen).chosen == (5, 6, 7)
    assert accepted((5, 9), chosen).chosen == (5, 6)
    assert accepted((9, 6), chosen).chosen == (5,)


def test_a_failed_row_counts_only_if_it_is_reached() -> None:
    chosen = Chosen((5, 6), error="broken")
    assert accepted((9, 6), chosen).error is None
    assert accepted((5, 9), chosen).error is None
    reached = accepted((5, 6), chosen)
    assert (reached.chosen, reached.num_accepted, reached.error) == ((5, 6), 2, "broken")
