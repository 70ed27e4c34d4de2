"""The native target: whatever is drafted, packed, shared, preempted or refused, the tokens are the plain run's."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.errors import InvalidField, OutOfBlocks
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from engine.cpu_setup import in_own_thread
from engine.factory import load_model
from engine.forward import CausalModel, PackedSpan
from engine.hidden_states import HiddenStateCache
from engine.native import NativeLimits, NativeTarget
from engine.pass_timing import measure_cost
from router.cost_model import ROWS
from router.plan import Span
from tests.support.families import write_family
from tests.support.features import rows_of
from tests.support.quick import first
from tests.support.requests import a_request

LIMITS = NativeLimits(num_blocks=40, block_len=16, max_num_sequences=8, max_pass_tokens=128, max_model_len=200)
NUM_TOKENS = 24
PENALIZED = SamplingParams(
    max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.3, frequency_penalty=0.4
)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=11),
    "penalized": PENALIZED,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp("native") / "model"
    write_family("llama", folder)
    return load_model(folder, "float32")


@pytest.fixture
def target(model: CausalModel) -> NativeTarget:
    return NativeTarget(model, LIMITS)


def request(name: str, sampling: SamplingParams, prompt_len: int = 37) -> Request:
    rng = random.Random(name)
    return Request(name, tuple(rng.randrange(3, 211) for _ in range(prompt_len)), sampling, arrival_s=0.0)


class Caller:
    """A sequence as a round would drive it."""

    def __init__(self, target: NativeTarget, request: Request) -> None:
        self.target, self.request = target, request
        self.token_ids = list(request.prompt_token_ids)
        self.num_accepted = 0
        self.computed_len = target.open(request, self.token_ids)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.request.prompt_token_ids) :])

    def chunk(self, num_tokens: int) -> Span:
        ids = self.token_ids[self.computed_len : self.computed_len + num_tokens]
        samples = self.computed_len + len(ids) == len(self.token_ids)
        return Span.bound(self.request.id, self.computed_len, tuple(ids), samples=samples)

    def span(self, drafts: Sequence[int] = ()) -> Span:
        ids = (*self.token_ids[self.computed_len :], *drafts)
        return Span.bound(self.request.id, self.computed_len, ids, num_drafts=len(drafts))

    def take(self, span: Span, outcome: Span) -> None:
        assert outcome.request_id == self.request.id
        self.computed_len += len(span.token_ids) - span.num_drafts + outcome.num_accepted
        self.num_accepted += outcome.num_accepted
        self.token_ids += outcome.chosen

    def run(self, span: Span) -> None:
        self.take(span, self.target.execute([span])[0])

    def preempt(self) -> None:
        self.target.release(self.request.id)
        self.computed_len = self.target.open(self.request, self.token_ids)


def plain(model: CausalModel, request: Request) -> tuple[int, ...]:
    caller = Caller(NativeTarget(model, LIMITS, prefix_cache=False), request)
    while len(caller.output) < NUM_TOKENS:
        caller.run(caller.span())
    return caller.output[:NUM_TOKENS]


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
@pytest.mark.parametrize("chunk_len", first(2, [7, 36, 1, 16]))
def test_prompts_in_chunks_of_any_size(model: CausalModel, target: NativeTarget, sampling: str, chunk_len: int) -> None:
    wanted = request("a", SAMPLINGS[sampling])
    caller = Caller(target, wanted)
    while len(caller.output) < NUM_TOKENS:
        caller.run(caller.chunk(chunk_len))
    assert caller.output == plain(model, wanted)
    target.check_integrity()


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
@pytest.mark.parametrize("wrong", first(1, [0.3, 0.0, 1.0]))
def test_drafts_never_change_the_tokens(model: CausalModel, target: NativeTarget, sampling: str, wrong: float) -> None:
    """Drafts of random length, each token wrong with the given probability, three sequences in a pass."""
    rng = random.Random(1)
    wanted = [request(name, SAMPLINGS[sampling]) for name in "abc"]
    expected = [plain(model, each) for each in wanted]
    callers = [Caller(target, each) for each in wanted]
    while any(len(caller.output) < NUM_TOKENS for caller in callers):
        spans = []
        for caller, tokens in zip(callers, expected, strict=True):
            right = tokens[len(caller.output) : len(caller.output) + rng.randint(0, 6)]
            spans.append(caller.span([rng.randrange(211) if rng.random() < wrong else token for token in right]))
        for caller, span, outcome in zip(callers, spans, target.execute(spans), strict=True):
            caller.take(span, outcome)
        target.check_integrity()
    for caller, tokens in zip(callers, expected, strict=True):
        assert caller.output[:NUM_TOKENS] == tokens
    if wrong == 0.0:
        assert sum(caller.num_accepted for caller in callers) > NUM_TOKENS


def test_right_drafts_are_all_accepted_and_followed_by_a_bonus_token(model: CausalModel, target: NativeTarget) -> None:
    wanted = request("a", SAMPLINGS["sampled"])
    expected = plain(model, wanted)
    outcome = target.execute([Caller(target, wanted).span(expected[:8])])[0]
    assert (outcome.chosen, outcome.num_accepted) == (expected[:9], 8)


def test_preempted_and_recomputed_sequences_go_on_as_if_nothing_had_been(model: CausalModel, target: NativeTarget) -> None:
    wanted = [request(name, PENALIZED) for name in "ab"]
    callers = [Caller(target, each) for each in wanted]
    rng = random.Random(2)
    while any(len(caller.output) < NUM_TOKENS for caller in callers):
        for caller in callers:
            if rng.random() < 0.25:
                caller.preempt()
        spans = [caller.span([rng.randrange(211)]) for caller in callers]
        for caller, span, outcome in zip(callers, spans, target.execute(spans), strict=True):
            caller.take(span, outcome)
        target.check_integrity()
    for caller in callers:
        assert caller.output[:NUM_TOKENS] == plain(model, caller.request)


def test_a_cached_prefix_is_not_computed_again_and_changes_nothing(model: CausalModel, target: NativeTarget) -> None:
    first = request("a", SAMPLINGS["greedy"], prompt_len=64)
    Caller(target, first).run(Span.bound("a", 0, first.prompt_token_ids))
    second = replace(first, id="b", prompt_token_ids=(*first.prompt_token_ids[:50], 9, 9, 9))
    caller = Caller(target, second)
    assert caller.computed_len == 48
    while len(caller.output) < NUM_TOKENS:
        caller.run(caller.span())
    assert caller.output == plain(model, second)
    target.release("a")
    third = Caller(target, replace(first, id="c"))
    assert third.computed_len == 48  # of 64: the last token must be computed, and so its block
    target.check_integrity()


def test_without_blocks_nothing_is_computed_and_nothing_changes(model: CausalModel) -> None:
    small = NativeTarget(model, replace(LIMITS, num_blocks=4, max_model_len=60))
    expected = plain(model, request("a", SAMPLINGS["greedy"], prompt_len=20))
    caller = Caller(small, request("a", SAMPLINGS["greedy"], prompt_len=20))
    rival = Caller(small, request("b", SAMPLINGS["greedy"], prompt_len=40))
    caller.run(caller.span())
    with pytest.raises(OutOfBlocks):
        small.execute([caller.span(), rival.span()])
    small.check_integrity()
    small.release("b")
    while len(caller.output) < NUM_TOKENS:
        caller.run(caller.span())
    assert caller.output == expected
    small.release("a")
    assert small.capacity().num_free_blocks == 4


def test_a_pass_that_fails_is_rolled_back(model: CausalModel, target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(target, request("a", SAMPLINGS["greedy"]))
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda hidden: torch.zeros(1, 1))
        with pytest.raises(ValueError, match="do not fit"):
            target.execute([caller.span()])
    target.check_integrity()
    caller.run(caller.span())
    assert caller.output == plain(model, caller.request)[:1]


def test_prefill_chunks_and_verify_spans_share_a_pass(model: CausalModel, target: NativeTarget) -> None:
    early, late = request("a", SAMPLINGS["greedy"]), request("b", SAMPLINGS["sampled"], prompt_len=90)
    expected = plain(model, early)
    first, second = Caller(target, early), Caller(target, late)
    first.run(first.span())
    spans = [second.chunk(50), first.span(expected[1:4])]
    outcomes = target.execute(spans)
    assert outcomes[0].chosen == ()
    assert outcomes[1].chosen == expected[1:5]
    for caller, span, outcome in zip((second, first), spans, outcomes, strict=True):
        caller.take(span, outcome)
    while len(second.output) < NUM_TOKENS:
        second.run(second.span())
    assert second.output == plain(model, late)


def test_spans_that_contradict_the_ledger_are_refused(target: NativeTarget) -> None:
    caller = Caller(target, request("a", SAMPLINGS["greedy"]))
    with pytest.raises(ValueError, match="starts at 3; 0 tokens are computed"):
        target.execute([Span.bound("a", 3, (1, 2))])
    with pytest.raises(ValueError, match="2 drafts in 2 tokens"):
        target.execute([Span.bound("a", 0, (1, 2), num_drafts=2)])
    with pytest.raises(ValueError, match="1 drafts in 2 tokens"):
        target.execute([Span.bound("a", 0, (1, 2), num_drafts=1, samples=False)])
    target.check_integrity()
    caller.run(caller.span())
    assert len(caller.output) == 1


def test_no_spans_no_pass_and_unknown_requests_are_released_quietly(target: NativeTarget) -> None:
    assert not target.execute([])
    target.release("never seen")


def test_limits_that_cannot_be_kept_are_refused(model: CausalModel) -> None:
    with pytest.raises(InvalidField, match="between 1 and the model's 512, got 513"):
        NativeTarget(model, replace(LIMITS, max_model_len=513))
    with pytest.raises(InvalidField, match="cannot hold one sequence of 200 tokens"):
        NativeTarget(model, replace(LIMITS, num_blocks=12))


def test_log_probabilities_are_the_models(model: CausalModel, target: NativeTarget) -> None:
    wanted = request("a", replace(SAMPLINGS["sampled"], top_logprobs=3))
    outcome = target.execute([Caller(target, wanted).span()])[0]
    cache = model.new_cache(LIMITS.num_blocks, LIMITS.block_len)
    hidden = model.forward([PackedSpan(0, wanted.prompt_token_ids, np.arange(4, dtype=np.int32))], cache)
    expected = model.logits(hidden[-1:])[0].log_softmax(-1)
    assert outcome.logprobs[0].logprob == pytest.approx(expected[outcome.chosen[0]].item(), abs=1e-4)
    assert [token for token, _ in outcome.logprobs[0].top] == expected.topk(3).indices.tolist()


@pytest.mark.slow
def test_calibration_measures_a_monotone_table_and_leaves_nothing_behind(target: NativeTarget) -> None:
    cost = measure_cost(target)
    assert cost.rows == tuple(rows for rows in ROWS if rows <= LIMITS.max_pass_tokens)
    assert list(cost.step_s_at) == sorted(cost.step_s_at)
    assert cost.step_s_at[0] > 0
    assert cost.per_context_s >= 0
    target.check_integrity()
    assert target.capacity().num_free_blocks == LIMITS.num_blocks


# ---- hidden states as drafters in its process read them: transformers' own, whatever became of the sequence


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
