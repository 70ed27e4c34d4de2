"""The noise is one function however it is computed, and it is Gumbel noise, independent over seeds, positions and tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from engine.noise import BLOCK_LEN, block_gumbel, block_max, gumbel, noise_keys
from tests.reference.noise import gumbel_of_few

NUM = 1 << 18
ALPHA = 1e-5  # of one test; with some fifty of them, sound noise would fail one in two thousand choices of seeds
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)
TOKENS = st.integers(0, 2**20)


def keys_of(seeds: object, positions: object) -> np.ndarray:
    seeds, positions = np.broadcast_arrays(np.atleast_1d(np.asarray(seeds, np.uint64)), np.asarray(positions, np.int64))
    return noise_keys(seeds.copy(), positions)


@given(st.lists(st.tuples(SEEDS, POSITIONS, TOKENS), min_size=1, max_size=20))
def test_numpy_and_torch_equal_the_definition(places: list[tuple[int, int, int]]) -> None:
    keys = keys_of([seed for seed, _, _ in places], [position for _, position, _ in places])
    token_ids = np.array([token_id for _, _, token_id in places])
    wanted = np.array([gumbel_of_few(seed, position, (token_id,))[0] for seed, position, token_id in places], np.float32)
    np.testing.assert_array_equal(gumbel(keys, token_ids), wanted)
    np.testing.assert_array_equal(gumbel(torch.from_numpy(keys), torch.from_numpy(token_ids)).numpy(), wanted)


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=8), st.integers(0, 2**14))
def test_blocks_hold_the_same_noise_and_bound_it(places: list[tuple[int, int]], first_block: int) -> None:
    keys = keys_of([seed for seed, _ in places], [position for _, position in places])[:, None]
    blocks = np.arange(first_block, first_block + 5)
    by_token = gumbel(keys, np.arange(first_block * BLOCK_LEN, (first_block + 5) * BLOCK_LEN)).reshape(-1, 5, BLOCK_LEN)
    np.testing.assert_array_equal(block_gumbel(keys, blocks, np.arange(BLOCK_LEN)), by_token)
    np.testing.assert_array_equal(block_max(keys, blocks), by_token.max(-1))
    tensors = [torch.from_numpy(array) for array in (keys, blocks, np.arange(BLOCK_LEN))]
    np.testing.assert_array_equal(block_gumbel(*tensors).numpy(), by_token)
    np.testing.assert_array_equal(block_max(*tensors[:2]).numpy(), by_token.max(-1))


def test_the_noise_of_a_seed_never_changes() -> None:
    """A sequence that is resumed by a later version goes on with the same tokens."""
    assert [gumbel_of_few(s, p, (t,))[0] for s, p, t in ((0, 0, 0), (1, 2, 3), (2**64 - 1, 8191, 151_935))] == PINNED


PINNED = [-0.4680158197879791, 0.2169148474931717, 0.02091819792985916]

LINES = {
    "tokens": (keys_of(7, 11), np.arange(NUM)),
    "positions": (keys_of(7, np.arange(NUM)), np.full(NUM, 100)),
    "seeds": (keys_of(np.arange(NUM), 11), np.full(NUM, 100)),
    "high bits of the seed": (keys_of(np.arange(NUM, dtype=np.uint64) << np.uint64(40), 11), np.full(NUM, 100)),
    "everything at once": (keys_of(np.arange(NUM), np.arange(NUM)), np.arange(NUM)),
}


@pytest.mark.parametrize("line", LINES)
def test_noise_is_standard_gumbel(line: str) -> None:
    values = gumbel(*LINES[line])
    assert stats.kstest(values.astype(np.float64), "gumbel_r").pvalue > ALPHA
    cells = np.bincount((uniform(values) * 256).astype(int), minlength=256)
    assert stats.chisquare(cells).pvalue > ALPHA


@pytest.mark.parametrize("lag", [1, 2, 63, 64, 65, 4096])
@pytest.mark.parametrize("line", LINES)
def test_neighbours_are_independent(line: str, lag: int) -> None:
    u = uniform(gumbel(*LINES[line]))
    assert joint_p_value(u[:-lag], u[lag:]) > ALPHA
    assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4.5 / np.sqrt(NUM)


def test_the_independence_test_sees_a_dependence() -> None:
    u = uniform(gumbel(*LINES["tokens"]))
    assert joint_p_value(u[:-1], 0.95 * u[1:] + 0.05 * u[:-1]) < ALPHA


def test_tokens_of_one_block_are_independent() -> None:
    """The first to arrive in a block delays the others: that must not show between any two of them."""
    noise = block_gumbel(keys_of(3, np.arange(NUM // 8)), np.full(NUM // 8, 5), np.arange(BLOCK_LEN))
    correlations = np.corrcoef(uniform(noise), rowvar=False)[np.triu_indices(BLOCK_LEN, 1)]
    z_scores = correlations * np.sqrt(len(noise))
    assert stats.kstest(z_scores, "norm").pvalue > ALPHA
    assert stats.chisquare(np.bincount(noise.argmax(-1), minlength=BLOCK_LEN)).pvalue > ALPHA
    u = uniform(noise)
    assert joint_p_value(u[:, 0], u[:, 1]) > ALPHA
    assert stats.kstest(np.sort(u, axis=-1)[:, -2], stats.beta(BLOCK_LEN - 1, 2).cdf).pvalue > ALPHA  # the second largest


def test_every_bit_of_the_input_flips_half_of_the_key() -> None:
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(0, 2**64, 2048, np.uint64), rng.integers(0, 2**20, 2048)
    keys = noise_keys(seeds, positions)
    for bit in range(64):
        assert_avalanche(keys ^ noise_keys(seeds ^ np.uint64(1 << bit), positions))
    for bit in range(20):
        assert_avalanche(keys ^ noise_keys(seeds, positions ^ (1 << bit)))


def assert_avalanche(difference: np.ndarray) -> None:
    flipped = (difference[:, None] >> np.arange(64)) & 1
    assert np.abs(flipped.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(len(difference))


def uniform(noise: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-noise.astype(np.float64)))


def joint_p_value(u: np.ndarray, w: np.ndarray) -> float:
    cells = np.bincount((u * 32).astype(int) * 32 + (w * 32).astype(int), minlength=1024)
    return float(stats.chisquare(cells).pvalue)
