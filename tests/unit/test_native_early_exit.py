"""Rows that leave a pass between layers never change a token, and leave nothing behind in the cache."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.errors import OutOfBlocks
from cluster.sampling_params import SamplingParams
from engine import early_exit
from engine.batch_layout import PackedSpan, StayingRows
from engine.early_exit import EarlyExit
from engine.exit_lens import ReducedScores, lens_product
from engine.exit_rows import MAX_DRAFTS, WatchedRows, watched_rows
from engine.factory import head_of, load_model, load_target
from engine.forward import CausalModel
from engine.models.weights import LinearWeight
from engine.native import NativeTarget
from engine.pass_timing import warm_up
from engine.sampling import SamplingState
from engine.tensor_parallel.rounds import Follower
from router.cost_model import TableCost
from router.estimates.trial import Trial
from router.papers.faser_exit import ExitPlan
from router.plan import Span
from tests.support.compiler import needs_compiler
from tests.support.families import write_family
from tests.support.features import rows_of
from tests.support.quick import first
from tests.support.thread_ranks import thread_ranks
from tests.unit.test_native import LIMITS, NUM_TOKENS, PENALIZED, SAMPLINGS, Caller, plain, request

pytestmark = pytest.mark.slow  # together they take seconds

VOCABULARY = 211
STEEP = TableCost((1, 100), (0.001, 0.1))  # every row costs as much
FLAT = TableCost((1, 100), (0.1, 0.1))  # further rows are free
LOGPROBS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3, top_logprobs=2)
ALL = {**SAMPLINGS, "logprobs": LOGPROBS, "filtered": SamplingParams(max_tokens=NUM_TOKENS, top_k=20, seed=8)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp("early-exit") / "model"
    write_family("llama-tied", folder)
    return load_model(folder, "float32")


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=needs_compiler)])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """In bf16, where products are ours and do not depend on other rows, a layer is one call."""
    folder = tmp_path_factory.mktemp("early-exit-dtypes") / "model"
    write_family("llama-tied", folder)
    model = load_model(folder, request.param)
    assert all((layer._whole is not None) == (request.param == "bfloat16") for layer in model._layers)
    return model


@dataclass(slots=True)
class RandomWatch:
    """Lets random suffixes of drafts leave after every layer."""

    spans: Sequence[Span]
    rng: random.Random
    depths: tuple[int, ...]
    span_lens: np.ndarray = field(init=False)
    num_left: int = 0

    def __post_init__(self) -> None:
        self.span_lens = np.array([len(span.token_ids) for span in self.spans])

    def look(self, depth: int, residual: torch.Tensor, delta: torch.Tensor | None) -> StayingRows | None:
        before = self.span_lens
        starts = np.concatenate([[0], np.cumsum(before)[:-1]])
        num_first = [len(span.token_ids) - span.num_drafts for span in self.spans]
        self.span_lens = np.array([self.rng.randint(first, n) for first, n in zip(num_first, before.tolist(), strict=True)])
        self.num_left += int((before - self.span_lens).sum())
        return StayingRows.of(starts, self.span_lens, residual.device)

    def nums_drafts(self) -> list[int]:
        return [n - span.num_compute for span, n in zip(self.spans, self.span_lens.tolist(), strict=True)]

    def learn(self) -> None:
        assert all(len(span.chosen) <= n for span, n in zip(self.spans, self.span_lens, strict=True))


@dataclass(slots=True)
class RandomExits:
    rng: random.Random
    depths: tuple[int, ...] = (1, 2, 3)
    num_left: int = 0
    watches: list[RandomWatch] = field(default_factory=list)

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> RandomWatch:
        self.watches.append(RandomWatch(spans, self.rng, self.depths))
        return self.watches[-1]


def poisoned(model: CausalModel, feature_layers: tuple[int, ...] = ()) -> NativeTarget:
    """A target whose cache is NaN wherever nothing was computed, so that reading such a row is an error."""
    target = NativeTarget(model, LIMITS, feature_layers=feature_layers)
    target._cache.keys.fill_(torch.nan)
    target._cache.values.fill_(torch.nan)
    return target


def serve(
    target: NativeTarget, callers: Sequence[Caller], expected: Sequence[Sequence[int]], wrong: float, seed: int
) -> int:
    """Runs all to their ends with drafts of 5, each token wrong with that probability. Returns how many were accepted."""
    rng = random.Random(seed)
    while any(len(caller.output) < NUM_TOKENS for caller in callers):
        spans = []
        for caller, tokens in zip(callers, expected, strict=True):
            right = tokens[len(caller.output) : len(caller.output) + 5]
            spans.append(caller.span([rng.randrange(VOCABULARY) if rng.random() < wrong else token for token in right]))
        for caller, span, outcome in zip(callers, spans, target.execute(spans), strict=True):
            assert outcome.error is None
            caller.take(span, outcome)
        target.check_integrity()
    return sum(caller.num_accepted for caller in callers)


def assert_states_of_whole_passes(target: NativeTarget, caller: Caller) -> None:
    """The hidden states that the target kept are those of a pass which no row left."""
    whole = NativeTarget(target.model, LIMITS, feature_layers=target.feature_layers)
    name, token_ids, num = caller.request.id, tuple(caller.token_ids), caller.computed_len
    whole.open(caller.request, token_ids)
    whole.execute([Span.bound(name, 0, token_ids[:num], samples=False)])
    found, expected = (rows_of(one, name, 0, num).float() for one in (target, whole))
    # In bf16 rounding differs by the shape of the attention. Rows of other tokens differ by as much as their norm.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (1e-4 if target.model.dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("sampling", sorted(ALL))
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_rows_that_leave_anywhere_never_change_the_tokens(any_model: CausalModel, sampling: str, seed: int) -> None:
    """In batches of three, with hidden states kept; then served again from the cached prefix."""
    model = any_model
    wanted = [request(name, ALL[sampling]) for name in "abc"]
    expected = [plain(model, each) for each in wanted]
    target = poisoned(model, feature_layers=(-1, 0, 2))
    exits = RandomExits(random.Random(seed))
    target.exit_early(exits)
    callers = [Caller(target, each) for each in wanted]
    num_accepted = serve(target, callers, expected, wrong=0.2, seed=seed)
    assert [caller.output[:NUM_TOKENS] for caller in callers] == expected
    assert sum(watch.num_left for watch in exits.watches) > 20
    assert num_accepted > 0
    for caller in callers:
        assert_states_of_whole_passes(target, caller)
        target.release(caller.request.id)
    target.exit_early(None)
    for caller, tokens in zip(callers, expected, strict=True):  # published blocks hold computed keys only
        again = Caller(target, replace(caller.request, id=f"{caller.request.id}2"))
        again.token_ids += tokens[: NUM_TOKENS - 4]
        target.release(again.request.id)
        again.computed_len = target.open(again.request, again.token_ids)
        assert again.computed_len > len(caller.request.prompt_token_ids)
        while len(again.output) < NUM_TOKENS:
            again.run(again.span())
        assert again.output[:NUM_TOKENS] == tokens
    target.check_integrity()


def test_a_row_that_left_must_not_count_as_computed(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: were rows that left before the last layer verified, the poisoned cache would show it."""
    wanted = request("a", SAMPLINGS["greedy"])
    expected = plain(model, wanted)
    target = poisoned(model)
    caller = Caller(target, wanted)
    caller.run(caller.span())
    drafts = expected[1:6]
    checkpoint = target._ledger.speculate("a", (expected[0], *drafts))
    packed = [PackedSpan(caller.computed_len, (expected[0], *drafts), target._ledger.block_table("a"))]
    watch = RandomWatch([Span.bound("a", caller.computed_len, (expected[0], *drafts), 5)], random.Random(0), (2,))
    monkeypatch.setattr(watch.rng, "randint", lambda first, last: first)
    model.forward_watched(packed, target._cache, (), watch)
    target._ledger.commit(checkpoint, 6)
    outcome = target.execute([Span.bound("a", caller.computed_len + 6, (9,), samples=True)])[0]
    assert outcome.error is not None


@pytest.mark.parametrize("family", ["llama-tied", "llama"])
def test_margins_after_the_last_layer_tell_what_will_be_chosen(family: str, tmp_path: Path) -> None:
    """Over the whole vocabulary, a margin is 0 exactly where the draft token is the one that the target chooses. Also of a
    model whose head is not its embedding."""
    write_family(family, tmp_path / "model")
    model = load_model(tmp_path / "model", "float32")
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["sampled"]):
        wanted = request("a", sampling)
        expected = plain(model, wanted)
        target = NativeTarget(model, LIMITS)
        caller = Caller(target, wanted)
        caller.run(caller.span())
        drafts = (expected[1], expected[2], (expected[3] + 1) % VOCABULARY)
        span = caller.span(drafts)
        rows = watched_rows([span], target._states)
        checkpoint = target._ledger.speculate("a", span.token_ids)
        hidden = model.forward([PackedSpan(span.base_len, span.token_ids, target._ledger.block_table("a"))], target._cache)
        target._ledger.commit(checkpoint, 0)
        scores = ReducedScores(model, head_of(model, tmp_path / "model"), np.arange(VOCABULARY))
        margins = scores.margins(hidden[:3], rows)
        assert margins[:2].tolist() == [0.0, 0.0]
        assert margins[2] > 0
        logits = model.logits(hidden[2:3])[0]
        if sampling.temperature == 0.0:
            assert margins[2] == pytest.approx((logits[expected[3]] - logits[drafts[2]]).item(), abs=1e-4)


def test_a_pass_without_blocks_takes_no_turn_of_a_trial(model: CausalModel) -> None:
    """It is planned again, and computed then: the pass with exits, or without, must not be skipped."""
    small = NativeTarget(model, replace(LIMITS, num_blocks=4, max_model_len=60))
    caller, rival = (Caller(small, request(name, SAMPLINGS["greedy"], 25)) for name in "ab")
    for one in (caller, rival):
        one.run(one.span())
    exits = RandomExits(random.Random(1))
    small.exit_early(exits)
    spans = [one.span((5,) * 20) for one in (caller, rival)]
    with pytest.raises(OutOfBlocks):
        small.execute(spans)
    assert exits.watches == []
    caller.run(caller.span((5,)))
    assert len(exits.watches) == 1
    small.check_integrity()


def test_requests_whose_logits_are_edited_are_not_watched(model: CausalModel) -> None:
    target = NativeTarget(model, LIMITS)
    callers = [Caller(target, request("a", PENALIZED)), Caller(target, request("b", SAMPLINGS["sampled"]))]
    rows = watched_rows([caller.span((1, 2, 3)) for caller in callers], target._states)
    assert rows.at.tolist() == [76, 77, 78]  # 37 prompt tokens each, and 3 drafts of the first
    assert rows.drafts.tolist() == [1, 2, 3]


@contextmanager
def over_ranks(folder: Path, num_ranks: int) -> Iterator[NativeTarget]:
    """Rank 0, whose tokens the other ranks choose too. All caches are poisoned."""
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**22, "block_len": 16, "max_model_len": 200}
    with thread_ranks(num_ranks) as group:
        if num_ranks == 1:
            targets = [load_target(folder, **options)]
        else:
            targets = group.on_all(lambda ranks: load_target(folder, **options, ranks=ranks))
        for target in targets:
            target._cache.keys.fill_(torch.nan)
            target._cache.values.fill_(torch.nan)
        following = [group.submit(Follower(one, group.ranks[i]).run) for i, one in enumerate(targets) if i]
        with closing(targets[0]):
            yield targets[0]
        for one in following:
            one.result()


def test_rows_leave_all_ranks_alike(tmp_path: Path) -> None:
    write_family("llama", tmp_path / "model")
    model = load_model(tmp_path / "model", "float32")
    wanted = [request(name, SAMPLINGS[name]) for name in sorted(SAMPLINGS)]
    expected = [plain(model, each) for each in wanted]
    exits = RandomExits(random.Random(1))
    with over_ranks(tmp_path / "model", 2) as target:
        target.exit_early(exits)
        callers = [Caller(target, each) for each in wanted]
        assert serve(target, callers, expected, wrong=0.2, seed=1) > 0
    assert [caller.output[:NUM_TOKENS] for caller in callers] == expected
    assert sum(watch.num_left for watch in exits.watches) > 20


@pytest.mark.parametrize(
    ("family", "num_ranks", "cost"), [("llama-tied", 1, FLAT), ("llama", 1, STEEP), ("llama", 2, STEEP)]
)
def test_exits_are_learned_where_rows_cost_time(
    family: str, num_ranks: int, cost: TableCost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_exit, "LENS_ROWS", (1, 2))
    monkeypatch.setattr("router.papers.faser_exit.MIN_GAIN", 0.01)  # this head is a small share of the model
    monkeypatch.setattr(early_exit, "MIN_SAMPLES", 8)
    monkeypatch.setattr(early_exit, "VOCABULARY_LEN", 64)
    monkeypatch.setattr(early_exit.ExitCheck, "seconds", lambda check, num_rows: 1e-5 * num_rows)
    folder = tmp_path / "model"
    write_family(family, folder)
    whole = load_model(folder, "float32")
    watches: list[early_exit.PassWatch] = []
    with over_ranks(folder, num_ranks) as target:
        exits = EarlyExit(target.model, cost, head_of(target.model, folder))
        target.exit_early(Recorded(exits, watches))
        for batch in range(6):
            wanted = [request(f"{name}{batch}", SAMPLINGS["greedy"]) for name in "abc"]
            expected = [plain(whole, each) for each in wanted]
            callers = [Caller(target, each) for each in wanted]
            serve(target, callers, expected, wrong=0.6, seed=batch)
            assert [caller.output[:NUM_TOKENS] for caller in callers] == expected
            for caller in callers:
                target.release(caller.request.id)
    assert any(rows_left(watch) for watch in watches) == (cost is STEEP)


def test_a_warm_up_is_plain_and_teaches_nothing(model: CausalModel) -> None:
    """Nor does one that fails end early exit."""
    watches: list[early_exit.PassWatch] = []
    target = NativeTarget(model, LIMITS)
    target.exit_early(Recorded(EarlyExit(model, STEEP, model.embedding), watches))
    warm_up(target, (1, 4))
    with pytest.raises(ValueError, match="pass"), target.without_exits():
        raise ValueError("a pass failed")
    assert not watches
    caller = Caller(target, request("a", SAMPLINGS["greedy"]))
    caller.run(caller.span())
    assert len(watches) == 1


def test_a_learning_pass_learns_as_much_where_rows_leave_before_the_head(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [request(name, SAMPLINGS["greedy"]) for name in "ab"]
    expected = [plain(model, each) for each in wanted]
    learned, has_left = [], []
    for last_threshold in (None, 0.0):
        exits = EarlyExit(model, STEEP, model.embedding)
        watches: list[early_exit.PassWatch] = []
        samples: list[tuple[np.ndarray, int, int]] = []
        exits._scores = ReducedScores(model, model.embedding, np.arange(VOCABULARY))
        size = model.config.hidden_size
        for check in exits.checks[:-1]:
            check.lens = lens_product(model, LinearWeight(torch.eye(size), torch.zeros(size)))
        plan = ExitPlan((0.0, 0.0, last_threshold), saved_share=0.5)
        monkeypatch.setattr(exits, "plan", lambda num_rows, num_spans, plan=plan: plan)
        monkeypatch.setattr(exits, "learn_spans", samples.extend)
        target = NativeTarget(model, LIMITS)
        callers = [Caller(target, each) for each in wanted]
        for caller in callers:
            caller.run(caller.span())
        target.exit_early(Recorded(exits, watches))
        exits._num_since = early_exit.IDLE_PERIOD  # a learning pass is due
        wrong = (expected[1][2] + 1) % VOCABULARY
        spans = [callers[0].span(expected[0][1:6]), callers[1].span((expected[1][1], wrong, *expected[1][3:6]))]
        outcomes = target.execute(spans)
        assert [outcome.chosen for outcome in outcomes] == [tuple(expected[0][1:7]), tuple(expected[1][1:3])]
        (watch,) = watches
        assert watch.plan is None
        has_left.append(watch.span_lens.tolist())
        fits = [check.fit._cross.tolist() for check in exits.checks if check.fit is not None]
        learned.append(([(margins.tolist(), *counts) for margins, *counts in samples], fits))
    assert has_left == [[6, 6], [6, 2]]
    assert learned[0] == learned[1]
    assert [num_accepted for _, _, num_accepted in learned[1][0]] == [5, 1]


def test_later_lenses_are_fitted_on_rows_of_all_places(model: CausalModel) -> None:
    """Of a pass of 256 rows, in spans of 8, every eighth row counts: another one in each pass."""
    exits = EarlyExit(model, STEEP, model.embedding)
    exits._scores = ReducedScores(model, model.embedding, np.arange(VOCABULARY))
    fit = exits.checks[0].fit
    assert fit is not None
    seen, before = [], 0.0
    for number in range(8):
        exits._num_learned = number
        hidden = {check.depth: torch.zeros(256, model.config.hidden_size) for check in exits.checks}
        hidden[exits.checks[-1].depth][:, 0] = torch.arange(256)
        exits.learn_rows([1] * 256, hidden)
        total = fit._cross[-1, 0].item()
        seen.append(total - before)
        before = total
    assert seen == [sum(range(number, 256, 8)) for number in range(8)]


@dataclass(slots=True)
class Recorded:
    exits: EarlyExit
    watches: list[early_exit.PassWatch]

    def watch(self, spans: Sequence[Span], states: Mapping[str, SamplingState]) -> "early_exit.PassWatch | None":
        watch = self.exits.watch(spans, states)
        if watch is not None:
            self.watches.append(watch)
        return watch


def test_a_check_of_few_rows_is_not_taken_for_cheaper_than_was_measured() -> None:
    """Much of a check takes as long for one row as for many."""
    check = early_exit.ExitCheck(30, None)
    assert check.seconds(112) == 0.0
    check.note_time(2e-3, 112)
    assert check.seconds(28) == check.seconds(100) == 2e-3
    assert check.seconds(224) == 4e-3
    check.note_time(1e-3, 28)
    assert check.seconds(28) == check.seconds(7) == 1e-3
    check.note_time(9e-3, 28)  # something else ran
    assert check.seconds(28) == pytest.approx(1.8e-3)


@pytest.fixture
def trying(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], early_exit.PassWatch | None]]:
    """Watches of passes of one size, for which thresholds are known to pay."""
    exits = EarlyExit(model, STEEP, model.embedding)
    exits._scores = ReducedScores(model, model.embedding, np.arange(VOCABULARY))  # as if lenses were fitted
    plan = ExitPlan((0.5,) * len(exits.checks), saved_share=0.5)
    monkeypatch.setattr(exits, "plan", lambda num_rows, num_spans: plan)
    margins = np.zeros((len(exits.checks), MAX_DRAFTS), np.float32)
    exits.learn_spans([(margins, 3, 1)] * early_exit.NUM_SAMPLES)
    target = NativeTarget(model, LIMITS)
    caller = Caller(target, request("a", SAMPLINGS["greedy"]))
    yield lambda: exits.watch([caller.span((1, 2, 3))], target._states)
    target.release("a")


def rows_left(watch: early_exit.PassWatch) -> bool:
    return watch.nums_drafts() != [span.num_drafts for span in watch.spans]


def chose(watch: early_exit.PassWatch, *token_ids: int) -> None:
    """The pass of one span ends with these tokens, all but the last of them accepted drafts."""
    watch.spans[0].chosen, watch.spans[0].num_accepted = token_ids, len(token_ids) - 1
    watch.learn()


def test_exits_that_lost_their_trial_are_learned_of_rarely(
    trying: Callable[[], early_exit.PassWatch | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning pass checks at every depth, and lets nothing leave while exits are paused."""
    monkeypatch.setattr(early_exit, "MIN_PAUSE", 4 * early_exit.IDLE_PERIOD)
    while (watch := trying()) is not None:
        if watch.trial is not None and watch.plan is not None:
            watch.trial.note(not watch.plan.is_off, 1.0 if watch.plan.is_off else 2.0)
    learning = [watch for _ in range(2 * early_exit.IDLE_PERIOD) if (watch := trying()) is not None]
    assert [watch.last_threshold for watch in learning] == [None, None]


def test_a_control_pass_does_no_more_than_a_plain_one(
    trying: Callable[[], early_exit.PassWatch | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Sequence[Span]] = []

    def counted(spans: Sequence[Span], *others: Any) -> WatchedRows:
        watched.append(spans)
        return watched_rows(spans, *others)

    monkeypatch.setattr(early_exit, "watched_rows", counted)
    kinds = []
    for _ in range(early_exit.PERIOD - 1):
        before, watch = len(watched), trying()
        assert watch is not None
        assert watch.plan is not None
        kinds.append(watch.plan.is_off)
        assert len(watched) - before == (not watch.plan.is_off)
        assert (watch.depths == ()) == watch.plan.is_off
    assert abs(sum(kinds) - len(kinds) / 2) < 1


def test_a_request_of_which_no_draft_was_rejected_is_not_checked(
    model: CausalModel, trying: Callable[[], early_exit.PassWatch | None]
) -> None:
    """Its drafts will probably be right again. The first rejection, seen or cut rightly, ends it."""

    def watched_after(num_left: int, num_accepted: int, last_id: int) -> int:
        while (watch := trying()) is None or watch.plan is None or watch.plan.is_off:
            pass
        watch.span_lens -= num_left
        chose(watch, *(1, 2, 3)[:num_accepted], last_id)
        while (watch := trying()) is None or watch.plan is None or watch.plan.is_off:
            pass
        return len(watch._rows.at)

    assert watched_after(0, 3, 7) == 0  # all three are right
    assert watched_after(0, 2, 7) == 3  # the third is rejected
    assert watched_after(2, 1, 2) == 0  # the second left, and was right
    assert watched_after(2, 1, 7) == 3  # the second left, and was wrong


def test_exits_that_are_faster_and_lose_tokens_are_turned_off(trying: Callable[[], early_exit.PassWatch | None]) -> None:
    """Each pass with exits takes half as long and loses, by the samples, two of the three tokens that it could commit."""
    num_exits = 0
    for _ in range(8 * early_exit.PERIOD):
        watch = trying()
        if watch is None or watch.plan is None:
            continue
        clock_s = time.perf_counter()
        if watch.plan.is_off:
            watch._started_s = clock_s - 2.0
            chose(watch, 1, 9)
        else:
            num_exits += 1
            watch._started_s = clock_s - 1.0
            watch.span_lens -= 3  # all drafts left; the first was right
            chose(watch, 1)
    assert num_exits < 2 * early_exit.PERIOD


def test_a_pass_that_checks_no_row_says_nothing_of_exits(
    trying: Callable[[], early_exit.PassWatch | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request whose drafts are all right would look as if exits saved nothing, and pause them for others."""
    while (watch := trying()) is None or watch.plan is None or watch.plan.is_off:
        pass
    noted: list[bool] = []
    assert watch.trial is not None
    monkeypatch.setattr(watch.trial, "note", lambda is_used, cost: noted.append(is_used))
    chose(watch, 1, 2, 3, 7)
    assert noted == [True]
    while (watch := trying()) is None or watch.plan is None or watch.plan.is_off:
        pass
    assert watch.num_watched == 0
    chose(watch, 1, 2, 3, 7)
    assert noted == [True]


def test_samples_go_on_until_they_allow_what_few_do_not(model: CausalModel) -> None:
    exits, trial = EarlyExit(model, STEEP, model.embedding), Trial(1, 1)
    off, on = ExitPlan((None,)), ExitPlan((0.0,))
    periods = []
    margins = np.zeros((len(exits.checks), MAX_DRAFTS), np.float32)
    for num in (0, early_exit.MIN_SAMPLES, early_exit.NUM_SAMPLES):
        exits.learn_spans([(margins, 3, 1)] * (num - len(exits._samples)))
        periods.append((exits._period(off, trial), exits._period(on, trial)))
    assert periods == [(4, 4), (16, 8), (128, 32)]
