"""The native target: whatever is drafted, packed, shared, preempted or refused, the tokens are the plain run's."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import InvalidField, OutOfBlocks
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from engine.factory import load_model
from engine.forward import CausalModel, PackedSpan
from engine.native import NativeLimits, NativeTarget
from engine.pass_timing import measure_cost
from router.cost_model import ROWS
from router.plan import Span
from tests.support.families import write_family
from tests.support.quick import first

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
