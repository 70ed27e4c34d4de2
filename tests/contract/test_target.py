"""What every target promises, the native one and vLLM alike: the same tokens, whatever is drafted, held or preempted.

vLLM's part runs in vLLM's environment: `make test-vllm`."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cluster.sampling_params import Grammar, GrammarKind, SamplingParams
from engine.target import AsynchronousEngine, TargetEngine
from tests.support.local_target import load_two_ranks
from tests.support.target_driver import Drafts, Played, play
from tests.support.tiny_model import write_tiny_model
from tests.support.vllm_engine import BLOCK_LEN, MAX_MODEL_LEN, NUM_BLOCKS, make_vllm

NUM_NEW = 24
VOCAB = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 32 values: vLLM computes no smaller ones on a CPU."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=128)


VLLM = [pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "vllm-2-ranks")]


@pytest.fixture(scope="module", params=["native", "native-2-ranks", *VLLM])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[TargetEngine]:
    if request.param == "native-2-ranks":
        with closing(load_two_ranks(folder, NUM_BLOCKS, BLOCK_LEN, 8, 256, MAX_MODEL_LEN)) as two:
            yield two
        return
    if request.param == "native":
        from engine.factory import build_model
        from engine.grammar.compiling import known_grammars
        from engine.models.config import load_config
        from engine.models.weights import open_weights
        from engine.native import NativeLimits, NativeTarget

        config = load_config(folder)
        import torch

        with open_weights(folder, config, torch.float32) as weights:
            model = build_model(config, weights, "float32", "cpu", BLOCK_LEN)
        grammars = known_grammars(folder, config.vocab_size, config.eos_token_ids)
        yield NativeTarget(model, NativeLimits(NUM_BLOCKS, BLOCK_LEN, 8, 256, MAX_MODEL_LEN), grammars=grammars)
        return
    target = make_vllm(folder, num_ranks=2 if request.param == "vllm-2-ranks" else 1)
    yield target
    target.close()


def prompts(prefix: str, seed: int = 1, lens: Sequence[int] = (20, 45, 70, 33)) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"{prefix}-{i}": [rng.randrange(1, 250) for _ in range(length)] for i, length in enumerate(lens)}


def sampled(names: Sequence[str], temperature: float, **options: object) -> dict[str, SamplingParams]:
    return {
        name: SamplingParams(NUM_NEW, temperature, seed=11 + i, ignore_eos=True, **options)  # type: ignore[arg-type]
        for i, name in enumerate(names)
    }


def perfect(plain: Played, asked: dict[str, list[int]], length: int = 7) -> Drafts:
    """Drafts that are right, by the answers of a plain run over requests in the same order."""
    answers = [plain.outputs[name] for name in plain.outputs]
    by_index = dict(enumerate(answers[i] for i in np.argsort([int(name.rsplit("-")[-1]) for name in plain.outputs])))

    def drafts(name: str, committed_len: int) -> Sequence[int]:
        start = committed_len - len(asked[name])
        return by_index[int(name.rsplit("-")[-1])][start : start + length]

    return drafts


def spoiled(drafts: Drafts, seed: int = 3) -> Drafts:
    """Of any length, and half of them wrong somewhere."""
    rng = random.Random(seed)

    def some(name: str, committed_len: int) -> Sequence[int]:
        found = list(drafts(name, committed_len))[: rng.randrange(0, 8)]
        if found and rng.random() < 0.5:
            found[rng.randrange(len(found))] = 255
        return found

    return some


def by_index(played: Played) -> list[tuple[int, ...]]:
    return [played.outputs[name] for name in sorted(played.outputs, key=lambda name: int(name.rsplit("-")[-1]))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_do_not_depend_on_drafts_or_holds(engine: TargetEngine, temperature: float) -> None:
    asked = prompts(f"plain{temperature}")
    plain = play(engine, asked, sampled(list(asked), temperature))
    right = prompts(f"right{temperature}")
    drafted = play(engine, right, sampled(list(right), temperature), perfect(plain, right))
    assert by_index(drafted) == by_index(plain)
    assert drafted.num_accepted == drafted.num_drafted > 0
    assert drafted.num_passes < plain.num_passes / 3
    wrong = prompts(f"wrong{temperature}")
    mixed = play(engine, wrong, sampled(list(wrong), temperature), spoiled(perfect(plain, wrong)))
    assert by_index(mixed) == by_index(plain)
    assert 0 < mixed.num_accepted < mixed.num_drafted
    held = prompts(f"held{temperature}")
    rng = random.Random(5)
    alternating = play(
        engine,
        held,
        sampled(list(held), temperature),
        spoiled(perfect(plain, held)),
        lambda name, number: rng.random() < 0.4,
    )
    assert by_index(alternating) == by_index(plain)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logit_bias": tuple((token, 4.0) for token in range(0, 250, 3))},
        {"top_p": 0.8, "top_k": 20},
        {"min_p": 0.1},
        {"allowed_token_ids": tuple(range(40, 90))},
        {"bad_words": (*((i,) for i in range(0, 240, 3)), *((i, i + 1) for i in range(1, 128)))},
        {"grammar": Grammar(GrammarKind.REGEX, "[a-f]{12}( [a-z]{3,9}){9}")},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "boolean"}, "minItems": 9}')},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parameters_hold_over_drafts(engine: TargetEngine, options: dict[str, object]) -> None:
    name = next(iter(options))
    asked = prompts(f"{name}-plain")
    plain = play(engine, asked, sampled(list(asked), 0.9, **options))
    again = prompts(f"{name}-drafted")
    drafted = play(engine, again, sampled(list(again), 0.9, **options), spoiled(perfect(plain, again)))
    assert by_index(drafted) == by_index(plain)
    assert drafted.num_accepted > 0
    without = prompts(f"{name}-without")
    assert by_index(play(engine, without, sampled(list(without), 0.9))) != by_index(plain), "the parameter does nothing"


def test_a_bad_word_is_cut_where_its_last_token_would_come(engine: TargetEngine) -> None:
    """A word of a plain answer, which drafts then propose over and over."""
    asked = prompts("whole")
    plain = play(engine, asked, sampled(list(asked), 0.9))
    words = tuple(output[3:6] for output in by_index(plain))
    again = prompts("cut")
    cut = by_index(play(engine, again, sampled(list(again), 0.9, bad_words=words), perfect(plain, again)))
    without = prompts("cut-without")
    assert by_index(play(engine, without, sampled(list(without), 0.9, bad_words=words))) == cut
    for before, output in zip(by_index(plain), cut, strict=True):
        assert output[:5] == before[:5]
        assert output[5] != before[5]
        assert not any(output[i : i + 3] in words for i in range(len(output)))


def test_logprobs_are_those_without_drafts(engine: TargetEngine) -> None:
    asked = prompts("logprobs-plain")
    plain = play(engine, asked, sampled(list(asked), 0.7, top_logprobs=3))
    again = prompts("logprobs-drafted")
    drafted = play(engine, again, sampled(list(again), 0.7, top_logprobs=3), spoiled(perfect(plain, again)))
    for one, other in zip(asked, again, strict=True):
        a, b = plain.logprobs[one], drafted.logprobs[other]
        assert [[token for token, _ in row.top] for row in a] == [[token for token, _ in row.top] for row in b]
        np.testing.assert_allclose([row.logprob for row in a], [row.logprob for row in b], atol=1e-4)
        assert all(row.logprob < 0 for row in a)


def test_logprobs_of_a_prompt_are_those_of_generating_it(engine: TargetEngine) -> None:
    asked = prompts("written")
    plain = play(engine, asked, sampled(list(asked), 0.7, top_logprobs=3))
    again = {f"read-{i}": [*asked[name], *plain.outputs[name]] for i, name in enumerate(asked)}
    rng = random.Random(3)
    read = play(
        engine,
        again,
        sampled(list(again), 0.0, prompt_logprobs=3),
        preempts=lambda name, number: rng.random() < 0.1,
        chunk_len=25,
    )
    assert set(read.num_cached.values()) == {0}, "rows in the prefix cache have no logits"
    for (name, prompt), found in zip(asked.items(), read.prompt_logprobs.values(), strict=True):
        assert len(found) == len(prompt) + NUM_NEW - 1
        a, b = plain.logprobs[name], found[len(prompt) - 1 :]
        assert [[token for token, _ in row.top] for row in a] == [[token for token, _ in row.top] for row in b]
        np.testing.assert_allclose([row.logprob for row in a], [row.logprob for row in b], atol=1e-4)
        for token, row in zip(plain.outputs[name], b, strict=True):
            tops = [top for top, _ in row.top]
            assert row.rank == 1 + tops.index(token) if token in tops else row.rank is not None and row.rank > 3


def test_a_preempted_request_goes_on_with_the_same_tokens(engine: TargetEngine) -> None:
    asked = prompts("kept")
    plain = play(engine, asked, sampled(list(asked), 0.8))
    again = prompts("preempted")
    rng = random.Random(2)
    held = {name for name in again if name.endswith(("-0", "-1"))}
    played = play(
        engine,
        again,
        sampled(list(again), 0.8),
        spoiled(perfect(plain, again)),
        lambda name, number: name in held and number % 2 == 0,
        lambda name, number: rng.random() < 0.1,
    )
    assert by_index(played) == by_index(plain)
    assert played.num_passes > plain.num_passes / 4


def test_drafts_pay_as_before_after_a_time_without(engine: TargetEngine) -> None:
    asked = prompts("whole")
    plain = play(engine, asked, sampled(list(asked), 0.8))
    again = prompts("gap")
    right = perfect(plain, again)
    starts = {name: len(prompt) for name, prompt in again.items()}
    played = play(
        engine,
        again,
        sampled(list(again), 0.8),
        lambda name, length: () if 6 <= length - starts[name] < 14 else right(name, length),
    )
    assert by_index(played) == by_index(plain)
    assert played.num_accepted == played.num_drafted


def test_work_beside_passes_is_done_once_in_each(engine: TargetEngine) -> None:
    assert isinstance(engine, AsynchronousEngine)
    assert not engine.is_asynchronous, "on a CPU"
    asked, calls = prompts("beside"), list[None]()
    engine.meanwhile = lambda: calls.append(None)
    try:
        played = play(engine, asked, sampled(list(asked), 0.8))
    finally:
        engine.meanwhile = None
    assert len(calls) == played.num_passes
    assert by_index(played) == by_index(play(engine, prompts("alone"), sampled(list(prompts("alone")), 0.8)))


def test_the_prefix_cache_holds_what_was_committed_after_rejections(engine: TargetEngine) -> None:
    """Elsewhere hits collapse under speculation: a block with a rejected draft must not count as cached."""
    asked = prompts("first", seed=9, lens=(64,))
    (name,) = asked
    plain = play(engine, asked, sampled([name], 0.0))
    again = prompts("second", seed=9, lens=(64,))
    drafted = play(engine, again, sampled(list(again), 0.0), spoiled(perfect(plain, again)))
    assert next(iter(drafted.num_cached.values())) >= 32  # whole blocks of the same prompt, but for the last token
    longer = {"third-0": [*asked[name], *plain.outputs[name]]}
    follow_up = play(engine, longer, sampled(["third-0"], 0.0))
    assert follow_up.num_cached["third-0"] >= 64
    fresh = {"fourth-0": [251, *asked[name], *plain.outputs[name]]}
    assert play(engine, fresh, sampled(["fourth-0"], 0.0)).num_cached["fourth-0"] == 0


def test_requests_with_different_salts_share_no_prefix(engine: TargetEngine) -> None:
    ids = next(iter(prompts("x", seed=12, lens=(64,)).values()))
    found = []
    for i, salt in enumerate(("one", "two", "one", "")):
        played = play(engine, {f"salt-{i}": ids}, sampled([f"salt-{i}"], 0.0), salt=salt)
        found.append((played.num_cached[f"salt-{i}"] > 0, played.outputs[f"salt-{i}"]))
    assert [hit for hit, _ in found] == [False, False, True, False]
    assert all(output == found[0][1] for _, output in found)


def test_drafts_do_not_change_the_distribution(engine: TargetEngine) -> None:
    """The second token over many seeds, with a draft that is always the same, against plain decoding."""
    prompt = prompts("x", seed=4, lens=(12,))["x-0"]

    def seconds(prefix: str, drafts: Drafts) -> list[int]:
        found = []
        for start in range(0, 600, 8):
            names = [f"{prefix}-{i}" for i in range(start, start + 8)]
            sampling = {name: SamplingParams(2, 1.0, seed=1000 + int(name.rsplit("-")[-1])) for name in names}
            played = play(engine, dict.fromkeys(names, prompt), sampling, drafts)
            found += [played.outputs[name][1] for name in names]
        return found

    plain = seconds("plain", lambda name, length: ())
    likely = max(set(plain), key=plain.count)
    drafted = seconds("drafted", lambda name, length: (likely,))
    assert drafted == plain  # stronger than a test of distributions, which would pass by chance, too
    counts = np.bincount(plain, minlength=VOCAB)
    assert stats.entropy(counts / counts.sum()) > 1.0, "a choice that says nothing"
