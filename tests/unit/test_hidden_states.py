"""The target's hidden states as drafters in its process read them: transformers' own, whatever became of the sequence."""

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import InvalidField, OutOfBlocks
from engine.factory import load_model
from engine.forward import CausalModel
from engine.hidden_states import HiddenStateCache
from engine.native import NativeLimits, NativeTarget
from engine.threads import in_own_thread
from router.plan import Span
from tests.support.families import write_family
from tests.support.features import rows_of
from tests.support.requests import a_request

LIMITS = NativeLimits(num_blocks=40, block_len=16, max_num_sequences=8, max_pass_tokens=128, max_model_len=200)
LAYERS = (-1, 0, 2)  # of three: the last is taken after the final norm
VOCAB = 211


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("features") / "model"
    theirs = write_family(request.param, folder)
    return load_model(folder, "float32"), theirs


def expected(theirs: torch.nn.Module, token_ids: list[int], layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    with torch.no_grad():
        states = theirs(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layers], dim=-1)


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def opened(target: NativeTarget, name: str, token_ids: list[int]) -> int:
    return target.open(a_request(name, token_ids, max_tokens=100, temperature=0.0, ignore_eos=True), token_ids)


def grow(target: NativeTarget, name: str, token_ids: list[int], num_tokens: int, rng: random.Random) -> None:
    """Rounds with drafts that are mostly wrong, so that nearly each rolls something back."""
    while num_tokens > 0:
        base_len = len(token_ids) - 1
        drafts = tokens(rng.randrange(1000), rng.randint(0, 5))
        (outcome,) = target.execute([Span.bound(name, base_len, (token_ids[-1], *drafts), num_drafts=len(drafts))])
        token_ids += outcome.chosen
        num_tokens -= len(outcome.chosen)


def prefill(target: NativeTarget, name: str, token_ids: list[int], chunk_len: int) -> None:
    base_len = opened(target, name, token_ids)
    while base_len < len(token_ids) - 1:
        chunk = tuple(token_ids[base_len : min(base_len + chunk_len, len(token_ids) - 1)])
        target.execute([Span.bound(name, base_len, chunk, samples=False)])
        base_len += len(chunk)


def assert_features(target: NativeTarget, theirs: torch.nn.Module, name: str, token_ids: list[int]) -> None:
    """Of all positions that are computed: all but the last."""
    read = rows_of(target, name, 0, len(token_ids) - 1)
    torch.testing.assert_close(read, expected(theirs, token_ids)[:-1], rtol=1e-4, atol=1e-4)


def test_features_are_the_hidden_states_also_after_rollbacks(pair: tuple[CausalModel, torch.nn.Module]) -> None:
    model, theirs = pair
    target, rng = NativeTarget(model, LIMITS, feature_layers=LAYERS), random.Random(1)
    sequences = {"a": tokens(1, 37), "b": tokens(2, 50)}
    for name, token_ids in sequences.items():
        prefill(target, name, token_ids, 16)
    for _ in range(4):
        for name, token_ids in sequences.items():
            grow(target, name, token_ids, 8, rng)
            assert_features(target, theirs, name, token_ids)
    part = rows_of(target, "a", 5, 21)
    assert torch.equal(part, rows_of(target, "a", 0, 30)[5:21])
    assert rows_of(target, "a", 7, 7).shape == (0, len(LAYERS) * model.config.hidden_size)


def test_a_shared_prefix_shares_its_features(pair: tuple[CausalModel, torch.nn.Module]) -> None:
    model, theirs = pair
    target = NativeTarget(model, LIMITS, feature_layers=LAYERS)
    first = tokens(3, 60)
    prefill(target, "a", first, 60)
    grow(target, "a", first, 6, random.Random(2))
    second = [*first[:50], *tokens(4, 9)]
    assert opened(target, "b", second) == 48
    target.execute([Span.bound("b", 48, tuple(second[48:]))])
    torch.testing.assert_close(rows_of(target, "b", 0, 59), expected(theirs, second), rtol=1e-4, atol=1e-4)
    target.release("a")
    third = [*first[:40], *tokens(5, 30)]
    prefill(target, "c", third, 20)
    assert_features(target, theirs, "c", third)
    torch.testing.assert_close(rows_of(target, "b", 0, 59), expected(theirs, second), rtol=1e-4, atol=1e-4)


def test_features_of_a_preempted_sequence_are_gone_until_it_is_computed_again(
    pair: tuple[CausalModel, torch.nn.Module],
) -> None:
    model, theirs = pair
    target = NativeTarget(model, replace(LIMITS, num_blocks=8, max_model_len=120), feature_layers=LAYERS)
    token_ids = tokens(6, 40)
    prefill(target, "a", token_ids, 40)
    grow(target, "a", token_ids, 10, random.Random(3))
    target.release("a")
    with pytest.raises(LookupError):
        rows_of(target, "a", 0, 1)
    rival = tokens(7, 100)
    prefill(target, "b", rival, 100)  # takes the blocks
    with pytest.raises(OutOfBlocks):
        prefill(target, "a", token_ids, 40)
    target.release("a")
    target.release("b")
    prefill(target, "a", token_ids, 40)
    assert_features(target, theirs, "a", token_ids)


def test_only_committed_positions_can_be_read(pair: tuple[CausalModel, torch.nn.Module]) -> None:
    target = NativeTarget(pair[0], LIMITS, feature_layers=LAYERS)
    token_ids = tokens(8, 20)
    prefill(target, "a", token_ids, 20)
    for start, stop in ((0, 20), (-1, 3), (5, 4)):
        with pytest.raises(LookupError):
            rows_of(target, "a", start, stop)
    with pytest.raises(LookupError):
        rows_of(target, "b", 0, 1)
    plain = NativeTarget(pair[0], LIMITS)
    prefill(plain, "a", token_ids, 20)
    with pytest.raises(LookupError, match="feature_layers"):
        rows_of(plain, "a", 0, 1)


def test_committed_positions_can_be_read_while_a_pass_runs(
    pair: tuple[CausalModel, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the pass cannot, not even when its rows are written."""
    model, theirs = pair
    target = NativeTarget(model, LIMITS, feature_layers=LAYERS)
    token_ids, others = tokens(9, 40), tokens(10, 30)
    prefill(target, "a", token_ids[:31], 31)
    prefill(target, "b", others, 30)
    logits, read = model.logits, list[torch.Tensor]()

    def during(hidden: torch.Tensor) -> torch.Tensor:
        def reads() -> None:
            read.append(rows_of(target, "b", 0, 29))
            read.append(rows_of(target, "a", 0, 30))
            with pytest.raises(LookupError):
                rows_of(target, "a", 0, 31)

        in_own_thread(reads)
        return logits(hidden)

    monkeypatch.setattr(model, "logits", during)
    target.execute([Span.bound("a", 30, tuple(token_ids[30:35]), 4)])
    assert len(read) == 2
    torch.testing.assert_close(read[0], expected(theirs, others)[:29], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read[1], expected(theirs, token_ids[:31])[:30], rtol=1e-4, atol=1e-4)


def test_no_block_moves_while_hidden_states_are_copied(
    pair: tuple[CausalModel, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = NativeTarget(pair[0], LIMITS, feature_layers=LAYERS)
    prefill(target, "a", tokens(9, 20), 20)
    copy, order = HiddenStateCache.read, list[str]()
    released = threading.Thread(target=lambda: (target.release("a"), order.append("released")))

    def slowly(cache: HiddenStateCache, *position: Any) -> torch.Tensor:
        released.start()
        released.join(0.2)  # it must not end
        order.append("copied")
        return copy(cache, *position)

    monkeypatch.setattr(HiddenStateCache, "read", slowly)
    rows_of(target, "a", 0, 19)
    released.join()
    assert order == ["copied", "released"]


@pytest.mark.parametrize("layers", [(2, 1), (0, 0), (-2,), (3,)])
def test_layers_that_the_model_has_not_are_refused(
    pair: tuple[CausalModel, torch.nn.Module], layers: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidField, match="feature_layers: must ascend between -1 and 2"):
        NativeTarget(pair[0], LIMITS, feature_layers=layers)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_of_the_real_model(model_folder: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    layers = (-1, 4, 14, 29)
    model = load_model(model_folder, dtype)
    target = NativeTarget(model, LIMITS, feature_layers=layers)
    token_ids = [random.Random(9).randrange(model.config.vocab_size) for _ in range(40)]
    prefill(target, "a", token_ids, 17)
    grow(target, "a", token_ids, 5, random.Random(4))
    theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    wanted = expected(theirs, token_ids, layers)[:-1]
    read = rows_of(target, "a", 0, len(token_ids) - 1).float()
    for ours, their in zip(read.chunk(len(layers), -1), wanted.chunk(len(layers), -1), strict=True):
        error = (ours - their).norm(dim=-1) / their.norm(dim=-1)
        assert error.max() < (1e-3 if dtype == "float32" else 0.1)
