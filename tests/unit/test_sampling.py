"""The sampler chooses what a naive one does that looks at the whole vocabulary, one row at a time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.sampling_params import SamplingParams
from engine import gumbel_argmax
from engine.cpu import build
from engine.cpu.gumbel_argmax import CpuGumbelArgmax
from engine.noise import gumbel, noise_keys
from engine.sampling import Chosen, Sampler, SampleSpan, SamplingState
from tests.support.compiler import needs_compiler
from tests.support.sampling_cases import states

PLAIN = SamplingParams(max_tokens=64)
GREEDY = replace(PLAIN, temperature=0.0)
VOCAB_SIZES = [1, 2, 63, 64, 65, 200, 1000]


def process(row: Tensor, history: Sequence[int], prompt_len: int, sampling: SamplingParams, eos: Sequence[int]) -> Tensor:
    """The logits of one row as they are sampled: after everything, -inf where filtered. (V,)"""
    x = row.float().clone()
    for token_id in set(history):
        penalty = sampling.repetition_penalty
        x[token_id] = x[token_id] * penalty if x[token_id] < 0 else x[token_id] / penalty
    for token_id, num in Counter(history[prompt_len:]).items():
        x[token_id] = x[token_id] - sampling.frequency_penalty * num - sampling.presence_penalty
    for token_id, bias in sampling.logit_bias:
        x[token_id] += bias
    if sampling.allowed_token_ids:
        x[[token_id for token_id in range(len(x)) if token_id not in sampling.allowed_token_ids]] = -torch.inf
    if len(history) - prompt_len < sampling.min_tokens:
        for token_id in (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)):
            x[token_id] = -torch.inf
    for word in sampling.bad_words:
        output = history[prompt_len:]
        if len(output) >= len(word) - 1 and (*output[len(output) + 1 - len(word) :],) == word[:-1]:
            x[word[-1]] = -torch.inf
    if sampling.temperature == 0:
        return x
    z = (x - x.max()) / torch.tensor(sampling.temperature).clamp_min(1e-6)
    if sampling.top_k is not None and sampling.top_k < len(z):
        z[z < z.sort(descending=True).values[sampling.top_k - 1]] = -torch.inf
    if sampling.top_p < 1:
        ordered = z.sort(descending=True).values
        masses = ordered.exp().double().cumsum(0)
        num_kept = int((masses < sampling.top_p * masses[-1]).sum()) + 1
        z[z < ordered[num_kept - 1]] = -torch.inf
    if sampling.min_p > 0:
        z[z < np.log(sampling.min_p)] = -torch.inf
    return z


def naive(row: Tensor, history: Sequence[int], prompt_len: int, sampling: SamplingParams, eos: Sequence[int]) -> int:
    z = process(row, history, prompt_len, sampling, eos).double()
    if sampling.temperature > 0:
        key = noise_keys(np.array([sampling.seed], np.uint64), np.array([len(history)]))
        z = z + torch.from_numpy(gumbel(key, np.arange(len(z)))).double()
    return int((z == z.max()).nonzero()[0])


def raced(logits: Tensor, vocab_size: int) -> CpuGumbelArgmax:
    return CpuGumbelArgmax(build.load_library(logits.dtype), logits.dtype, np.arange(vocab_size))


@pytest.mark.parametrize(
    ("num_first_blocks", "kernel"), [(1, False), (8, False), pytest.param(8, True, marks=needs_compiler)]
)
@settings(max_examples=3 * settings.default.max_examples // 2)
@given(data=st.data())
def test_choices_equal_the_naive_sampler(num_first_blocks: int, kernel: bool, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from(VOCAB_SIZES))
    eos = (vocab_size // 2,)
    requests = data.draw(st.lists(states(vocab_size), min_size=1, max_size=5))
    spans = [SampleSpan(SamplingState(s, ids, n), drafts, rows) for s, ids, n, drafts, rows in requests]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(sum(span.num_rows for span in spans), vocab_size + 3, generator=generator)
    logits *= data.draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    if data.draw(st.booleans()):
        logits = logits.round(decimals=1)  # ties
    if data.draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
        logits[:, : vocab_size // 4 + 1] = 0.0
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    logits[:, vocab_size:] = 99.0  # padding
    before = logits.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gumbel_argmax, "_NUM_FIRST_BLOCKS", num_first_blocks)
        chosen = Sampler(vocab_size, eos, raced(logits, vocab_size) if kernel else None).choose(logits, spans)

    assert torch.equal(logits, before)
    row = 0
    for (sampling, token_ids, prompt_len, drafts, num_rows), got in zip(requests, chosen, strict=True):
        for i in range(num_rows):
            history = [*token_ids, *drafts[: len(drafts) + 1 - num_rows + i]]
            z = process(logits[row, :vocab_size], history, prompt_len, sampling, eos)
            if z.max() == -torch.inf or z.isnan().any():
                assert got.error is not None
                assert "every token is masked" in got.error
                assert len(got.token_ids) == i
                row += num_rows - i
                break
            assert got.token_ids[i] == naive(logits[row, :vocab_size], history, prompt_len, sampling, eos)
            row += 1
        else:
            assert got.error is None


def assert_equal_to_naive(logits: Tensor, sampling: SamplingParams) -> list[int]:
    """Of as many seeds as there are rows, which are all alike. The tokens chosen."""
    states = [SamplingState(replace(sampling, seed=seed), [1], 1) for seed in range(len(logits))]
    spans = [SampleSpan(state, (), 1) for state in states]
    chosen = Sampler(logits.shape[1], ()).choose(logits, spans)
    assert Sampler(logits.shape[1], (), raced(logits, logits.shape[1])).choose(logits, spans) == chosen
    token_ids = [c.token_ids[0] for c in chosen]
    assert token_ids == [naive(logits[0], [1], 1, state.sampling, ()) for state in states]
    return token_ids


@needs_compiler
@pytest.mark.parametrize("sampling", [PLAIN, replace(PLAIN, top_k=60), replace(PLAIN, top_p=0.4), replace(PLAIN, min_p=0.5)])
def test_rows_with_many_possible_winners_equal_the_naive_sampler(sampling: SamplingParams) -> None:
    """One likely token per block: many more blocks than are looked into at first can hold the winner."""
    vocab_size = 64 * 150
    logits = torch.full((300, vocab_size), -30.0)
    logits[:, 17::64] = torch.linspace(5, 7, 150)
    assert len(set(assert_equal_to_naive(logits, sampling))) > 30


@needs_compiler
def test_a_nucleus_of_most_of_the_vocabulary_equals_the_naive_sampler() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(6)) * 0.3
    assert_equal_to_naive(logits.expand(40, 5000), replace(PLAIN, top_p=0.9))


def test_penalties_reach_all_of_a_long_history() -> None:
    logits = torch.arange(500.0).expand(1, 500)
    state = SamplingState(replace(GREEDY, repetition_penalty=1.01, presence_penalty=2.0), list(range(499, 300, -1)), 100)
    state.extend(range(300, 200, -1))
    chosen = Sampler(500, ()).choose(logits, [SampleSpan(state, (), 1)])
    history = list(range(499, 200, -1))
    assert chosen[0].token_ids == (naive(logits[0], history, 100, state.sampling, ()),)
    strong = SamplingState(replace(GREEDY, logit_bias=((200, 30.0),), repetition_penalty=10.0), history, 100)
    assert Sampler(500, ()).choose(logits, [SampleSpan(strong, (), 1)])[0].token_ids == (200,)


def choose_one(logits: Tensor, sampling: SamplingParams, drafts: tuple[int, ...] = (), eos: tuple[int, ...] = ()) -> Chosen:
    """As if after the prompt (0,)."""
    span = SampleSpan(SamplingState(sampling, [0], 1), drafts, len(logits))
    return Sampler(logits.shape[1], eos).choose(logits, [span], want_confidences=True)[0]


def test_a_choice_depends_on_nothing_else_in_the_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(40, 500) * 3
    params = [PLAIN, GREEDY, replace(PLAIN, top_p=0.8), replace(PLAIN, top_k=7), replace(PLAIN, repetition_penalty=1.5)]
    spans = [SampleSpan(SamplingState(replace(params[i % 5], seed=i), [i], 1), (), 1) for i in range(40)]
    sampler = Sampler(500, (3,))
    together = sampler.choose(logits, spans)
    assert together == [sampler.choose(logits[i : i + 1], [span])[0] for i, span in enumerate(spans)]


def test_a_row_of_a_span_is_chosen_as_if_its_drafts_were_committed() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 300)
    drafts = (7, 7, 9, 100)
    sampling = replace(PLAIN, seed=3, frequency_penalty=1.0, repetition_penalty=1.4, min_tokens=3, stop_token_ids=(8,))
    sampler = Sampler(300, (5,))
    state = SamplingState(sampling, [1, 2, 3], 2)
    spans = sampler.choose(logits, [SampleSpan(state, drafts, 5)])[0].token_ids
    tails = [sampler.choose(logits[5 - n :], [SampleSpan(state, drafts, n)])[0].token_ids for n in range(1, 6)]
    singles = []
    for i in range(5):
        singles.append(sampler.choose(logits[i : i + 1], [SampleSpan(state, (), 1)])[0].token_ids[0])
        state.extend(drafts[i : i + 1])
    assert spans == tuple(singles)
    assert tails == [spans[5 - n :] for n in range(1, 6)]
    assert (len(state), state.num_generated) == (7, 5)


@pytest.mark.slow
def test_sampled_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = probabilities.log().expand(20_000, 5)
    spans = [SampleSpan(SamplingState(replace(PLAIN, seed=seed), [0], 1), (), 1) for seed in range(len(logits))]
    counts = torch.zeros(5)
    for chosen in Sampler(5, ()).choose(logits, spans):
        counts[chosen.token_ids[0]] += 1
    statistic = ((counts - len(logits) * probabilities) ** 2 / (len(logits) * probabilities)).sum()
    assert statistic < 23.5  # the 99.99th percentile of chi-square with 4 degrees of freedom


def test_confidence_is_the_probability_under_what_is_sampled() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for sampling, probabilities in {
        PLAIN: {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1},
        GREEDY: {0: 0.4},
        replace(PLAIN, top_k=2): {0: 4 / 7, 1: 3 / 7},
        replace(PLAIN, top_p=0.75): {0: 4 / 9, 1: 3 / 9, 2: 2 / 9},
        replace(PLAIN, min_p=0.6): {0: 4 / 7, 1: 3 / 7},
        replace(PLAIN, temperature=0.5): {0: 16 / 30, 1: 9 / 30, 2: 4 / 30, 3: 1 / 30},
    }.items():
        seen = {}
        for seed in range(100):
            chosen = choose_one(logits, replace(sampling, seed=seed))
            seen[chosen.token_ids[0]] = chosen.confidences[0]
        assert seen == pytest.approx(probabilities, rel=1e-5)


def test_top_p_of_what_top_k_has_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    both = replace(PLAIN, top_k=2, top_p=0.55)  # 0.4 of 0.7 is 0.571
    assert {choose_one(logits, replace(both, seed=seed)).token_ids for seed in range(100)} == {(0,)}


def test_logprobs_are_of_the_raw_distribution() -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, 100)
    sampling = replace(PLAIN, temperature=0.2, top_k=3, logit_bias=((4, 50.0),), top_logprobs=5)
    chosen = choose_one(logits, sampling, drafts=(1, 2))
    raw = logits.log_softmax(-1)
    assert chosen.token_ids == (4, 4, 4)
    for row, logprobs in enumerate(chosen.logprobs):
        assert logprobs.logprob == pytest.approx(float(raw[row, 4]))
        top = raw[row].topk(5)
        assert [token_id for token_id, _ in logprobs.top] == top.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(top.values.tolist())
    alone = choose_one(logits, replace(sampling, top_logprobs=0), drafts=(1, 2))
    assert [lp.top for lp in alone.logprobs] == [(), (), ()]
    assert choose_one(logits, PLAIN, drafts=(1, 2)).logprobs == ()


@needs_compiler
def test_a_request_without_a_choice_fails_alone() -> None:
    torch.manual_seed(5)
    good = torch.randn(2, 10)
    rows = [good, torch.full((2, 10), -torch.inf), torch.full((2, 10), torch.nan), torch.full((2, 10), torch.inf), good]
    one_nan = good.clone()
    one_nan[1, 3] = torch.nan
    rows.append(one_nan)
    for sampling in (PLAIN, GREEDY, replace(PLAIN, top_p=0.5), replace(PLAIN, top_k=2), replace(PLAIN, top_logprobs=3)):
        spans = [SampleSpan(SamplingState(sampling, [0], 1), (1,), 2) for _ in rows]
        logits = torch.cat(rows)
        chosen = Sampler(10, ()).choose(logits, spans, want_confidences=True)
        by_kernel = Sampler(10, (), raced(logits, 10)).choose(logits, spans)
        assert [(c.token_ids, c.error) for c in by_kernel] == [(c.token_ids, c.error) for c in chosen]
        whole, masked, nan, infinite, again, half = chosen
        assert whole.error is None
        assert len(whole.token_ids) == 2
        assert again == whole
        assert masked == Chosen((), error="no token can be chosen at position 1: every token is masked", is_refused=True)
        assert nan == Chosen((), error="no token can be chosen at position 1: its logits hold nan")
        assert infinite == Chosen((), error="no token can be chosen at position 1: its logits hold inf")
        assert half.token_ids == whole.token_ids[:1]
        assert half.error == "no token can be chosen at position 2: its logits hold nan"
        assert (len(half.confidences), len(half.logprobs)) == (1, 1 if sampling.top_logprobs else 0)


def test_logits_that_do_not_fit_are_refused() -> None:
    span = SampleSpan(SamplingState(PLAIN, [0], 1), (), 1)
    sampler = Sampler(10, ())
    assert sampler.choose(torch.zeros(0, 10), []) == []
    for shape in [(2, 10), (1, 9), (1, 1, 10)]:
        with pytest.raises(ValueError, match="do not fit 1 rows of 10 tokens"):
            sampler.choose(torch.zeros(shape), [span])
    with pytest.raises(ValueError, match="no 2 rows"):
        SampleSpan(SamplingState(PLAIN, [0], 1), (), 2)
    with pytest.raises(ValueError, match="prompt of 2 tokens"):
        SamplingState(PLAIN, [0], 2)


def test_min_tokens_masks_the_ends_until_then_and_no_longer() -> None:
    logits = torch.zeros(4, 4)
    logits[:, 1], logits[:, 2] = 9.0, 5.0
    sampling = replace(GREEDY, min_tokens=2, stop_token_ids=(2, 99))
    assert choose_one(logits, sampling, drafts=(0, 0, 0), eos=(1,)).token_ids == (0, 0, 1, 1)
    lenient = replace(sampling, ignore_eos=True)
    assert choose_one(logits, lenient, drafts=(0, 0, 0), eos=(1,)).token_ids == (1, 1, 1, 1)


def test_requests_without_a_seed_have_noise_of_their_own() -> None:
    logits = torch.zeros(1, 1000)
    chosen = set()
    for _ in range(8):
        state = SamplingState(SamplingParams(max_tokens=4, temperature=1.0), [1], 1)
        (one,) = Sampler(1000, ()).choose(logits, [SampleSpan(state, (), 1)])
        chosen.add(one.token_ids)
    assert len(chosen) > 1
