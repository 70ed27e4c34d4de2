"""How a model and the cores of a machine are split over vLLM's ranks."""

import os
from pathlib import Path

import pytest

from cluster.errors import InvalidField
from engine.models.config import DecoderConfig, load_config
from engine.vllm.ranks import BINDING, NOT_BOUND, binding_of, check_ranks, shard_of, threads_of_ranks
from tests.support.tiny_model import write_tiny_model


def shape_of(folder: Path, num_heads: int, num_kv_heads: int, num_columns: int) -> DecoderConfig:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return load_config(write_tiny_model(folder, hidden_size=8 * num_heads, intermediate_size=num_columns, **heads))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_columns", "num_ranks", "words"),
    [
        (9, 3, 64, 2, "must divide the 3 key-value heads"),
        (8, 4, 64, 8, "must divide the 4 key-value heads"),
        (8, 4, 66, 4, "must divide the 66 columns"),
    ],
)
def test_heads_that_do_not_divide_are_refused(
    tmp_path: Path, num_heads: int, num_kv_heads: int, num_columns: int, num_ranks: int, words: str
) -> None:
    with pytest.raises(InvalidField, match=words):
        check_ranks(shape_of(tmp_path / "model", num_heads, num_kv_heads, num_columns), num_ranks)


def test_a_rank_holds_its_part_of_the_cache(tmp_path: Path) -> None:
    whole = shape_of(tmp_path / "model", 8, 4, 64)
    assert shard_of(whole, 2).kv_bytes_per_token(2) * 2 == whole.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("cores", "num_ranks", "num_threads", "expected"),
    [
        ({0: 0, 1: 1}, 2, 1, "0|1"),
        ({0: 0, 1: 1, 2: 2, 3: 3}, 2, 2, "0,1|2,3"),
        ({0: 0, 1: 0, 2: 1, 3: 1}, 2, 1, "0|2"),  # two CPUs of each core
        ({4: 2, 6: 3}, 2, 1, "4|6"),
        ({0: 0, 1: 1}, 2, 2, NOT_BOUND),
        ({0: 0, 1: 0}, 2, 1, NOT_BOUND),
    ],
)
def test_ranks_get_cores_of_their_own(cores: dict[int, int], num_ranks: int, num_threads: int, expected: str) -> None:
    assert binding_of(cores, num_ranks, num_threads) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, "0|1"), ("auto", "0|1"), ("2|3", "2|3")])
def test_a_binding_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str) -> None:
    monkeypatch.delenv(BINDING, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    if asked is not None:
        monkeypatch.setenv(BINDING, asked)
    with threads_of_ranks("0|1", 1):
        assert (os.environ[BINDING], os.environ["OMP_NUM_THREADS"]) == (expected, "1")
    assert (os.environ.get(BINDING), os.environ["OMP_NUM_THREADS"]) == (asked, "7")
