"""The served DSpark drafter against the network in plain torch; its cache and its drafts."""

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from cluster.sampling_params import SamplingParams
from drafters.hidden_states import sequential
from drafters.hidden_states.block_stage import BlockStage
from drafters.hidden_states.checkpoint import load_network
from drafters.protocol import Demand
from engine.cpu.ops import CpuOps
from engine.factory import load_model
from engine.forward import CausalModel, PackedSpan
from engine.kv_cache import KvCache
from engine.noise import gumbel, noise_keys
from engine.sampling import Sampler, SampleSpan, SamplingState
from profiler.calibration import TemperatureScaling
from tests.support.compiler import needs_compiler
from tests.support.dspark import WithFeatures, make_dspark, target_rows, write_dspark, write_speculators
from tests.support.features import rows_of
from tests.support.quick import first
from tests.support.tiny_model import write_tiny_model

VOCAB_SIZE = 257
EOS = VOCAB_SIZE - 1
BLOCK = 6
REDUCED = sorted(random.Random(3).sample(range(VOCAB_SIZE), 150))
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=80, temperature=0.8, seed=5, ignore_eos=True)
PENALIZED = SamplingParams(
    max_tokens=80, temperature=0.8, seed=6, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5, top_k=40
)
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "anchor-input": {"anchor_input": True, "anchor_input_rank": 12, "draft_token_ids": REDUCED},
    "no-confidence": {"enable_confidence_head": False},
    "full-anchor-input": {"anchor_input": True, "target_layer_ids": [-1, 0, 1, 2]},
    "no-markov": {"markov_rank": 0, "enable_confidence_head": False},
    "own-embedding": {"shares_embedding": False, "fc_bias": False},
    "gated": {"markov_head_type": "gated"},
    "reduced": {"draft_token_ids": REDUCED, "markov_head_type": "rnn"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 16: the C kernels take part.
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3, hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def model(target: Path) -> CausalModel:
    return load_model(target, "float32")


@pytest.fixture(params=first(2, VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path: Path, target: Path) -> Path:
    return write_dspark(tmp_path / "drafter", target, **VARIANTS[request.param])


@pytest.fixture
def vanilla(tmp_path: Path, target: Path) -> Path:
    return write_dspark(tmp_path / "drafter", target)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE - 1) for _ in range(length)]


class Reference:
    """Drafts by the network in plain torch, one token after the other."""

    def __init__(self, folder: Path, target: Path, drafter: WithFeatures) -> None:
        self.network = load_network(folder, target_rows(target))
        self.features = drafter.features
        self.sampler = Sampler(VOCAB_SIZE, (EOS,))
        self.margins: list[float] = []  # of the last draft

    @torch.no_grad()
    def draft(
        self, token_ids: list[int], prompt_len: int, sampling: SamplingParams, num: int, ahead: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        config, net = self.network.config, self.network
        anchor = len(token_ids) - 1
        self.features.token_ids["reference"] = token_ids
        features = rows_of(self.features, "reference", 0, anchor)
        features = torch.cat([features, torch.full((1, config.feature_size), 7.0)])  # the anchor's: not to be read
        hidden = net(features, torch.tensor(token_ids), (len(token_ids),), torch.tensor([anchor]))
        state = SamplingState(sampling, token_ids, prompt_len)
        said, confidences = list(ahead), []
        self.margins = []
        for k in range(len(ahead), min(config.block_size, len(ahead) + num)):
            padded = [token_ids[-1], *said] + [0] * (config.block_size - k - 1)
            previous = torch.tensor([padded[: config.block_size]])
            latents = net.latents(hidden, previous)
            logits = net.logits(hidden, latents)[0, k]
            if config.draft_token_ids is not None:
                logits = torch.full((VOCAB_SIZE,), -torch.inf).index_copy(0, torch.tensor(config.draft_token_ids), logits)
            z = logits.double().numpy()
            if sampling.temperature:
                key = noise_keys(np.array([sampling.seed], np.uint64), np.array([len(token_ids) + k]))
                z = z / sampling.temperature + gumbel(key, np.arange(VOCAB_SIZE))
            second, first = np.sort(z)[-2:]
            self.margins.append(first - second)
            (chosen,) = self.sampler.choose(logits[None], [SampleSpan(state, tuple(said), 1)], want_confidences=True)
            said.append(chosen.token_ids[0])
            head = config.has_confidence
            confidences.append(
                net.confidence_logits(hidden, previous)[0, k].sigmoid().item() if head else chosen.confidences[0]
            )
        return tuple(said[len(ahead) :]), tuple(confidences)


# Without kernels a sampled draft is chosen among the most probable tokens alone.
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SAMPLED, id="sampled", marks=needs_compiler),
        pytest.param(PENALIZED, id="penalized"),
    ],
)
def test_drafts_are_those_of_the_network(folder: Path, target: Path, model: CausalModel, sampling: SamplingParams) -> None:
    """Three requests at once over several rounds, each of which projects only new positions."""
    drafter = make_dspark(folder, target, model=model)
    reference = Reference(folder, target, drafter)
    rng = random.Random(1)
    texts = {name: text(i, 30 + 17 * i) for i, name in enumerate("abc")}
    for name, token_ids in texts.items():
        drafter.open(name, token_ids, 10, sampling)
    for _ in range(4):
        demands = [Demand(name, rng.randint(1, 8)) for name in texts]
        for demand, draft in zip(demands, drafter.propose(demands), strict=True):
            token_ids = texts[demand.request_id]
            expected, confidences = reference.draft(token_ids, 10, sampling, demand.num_tokens)
            assert draft.token_ids == expected
            assert draft.confidences == pytest.approx(confidences, abs=1e-4)
            kept = [*expected[: rng.randint(0, 3)], rng.randrange(EOS)]
            token_ids += kept
            drafter.extend(demand.request_id, kept)
        drafter.check_integrity()


@pytest.mark.parametrize("has_kernel", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED])
def test_margins_under_shared_noise_enter_the_confidences(
    sampling: SamplingParams,
    has_kernel: bool,
    folder: Path,
    target: Path,
    model: CausalModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernel:
        monkeypatch.setattr(CpuOps, "gumbel_argmax", lambda ops, token_ids: None)
        monkeypatch.setattr(sequential, "_NUM_CANDIDATES", VOCAB_SIZE)
    scaling = TemperatureScaling((2.0,), (-0.3,), (0.0, 1.5))
    plain, weighed = (make_dspark(folder, target, model=model, with_margins=m) for m in ({}, {0.0: scaling}))
    reference = Reference(folder, target, plain)
    tokens = text(3, 40)
    for drafter in (plain, weighed):
        drafter.open("a", tokens, 10, sampling)
    (expected,), (found,) = (drafter.propose([Demand("a", BLOCK)]) for drafter in (plain, weighed))
    reference.draft(tokens, 10, sampling, BLOCK)
    assert found.token_ids == expected.token_ids, "confidences change no token"
    if sampling is PENALIZED or not json.loads((folder / "config.json").read_text())["enable_confidence_head"]:
        assert found.confidences == expected.confidences, "of edited logits no margin is known"
        return
    weights = np.array([0.0, *[1.5] * (BLOCK - 1)])
    logits = np.log(np.array(expected.confidences) / (1 - np.array(expected.confidences)))
    scaled = logits / 2.0 - 0.3 + weights * np.log1p(reference.margins)
    assert found.confidences == pytest.approx((1 / (1 + np.exp(-scaled))).tolist(), abs=1e-3)


def test_the_context_is_projected_once(vanilla: Path, target: Path, model: CausalModel) -> None:
    drafter = make_dspark(vanilla, target, model=model)
    drafter.open("a", text(1, 70), 10, GREEDY)
    for _ in range(5):
        drafter.propose([Demand("a", 4)])
        drafter.propose([Demand("a", 2)])
        drafter.extend("a", [3, 4])
    assert drafter.features.num_rows == 69 + 4 * 2
    drafter.open("b", text(1, 70), 10, GREEDY)
    drafter.propose([Demand("b", 4)])
    assert drafter.features.num_rows == 69 + 4 * 2 + 5  # two blocks of 32 positions are shared


def test_tokens_ahead_are_taken_as_given(folder: Path, target: Path, model: CausalModel) -> None:
    drafter = make_dspark(folder, target, model=model)
    reference = Reference(folder, target, drafter)
    tokens = text(2, 40)
    drafter.open("a", tokens, 10, SAMPLED)
    drafter.open("b", tokens, 10, SAMPLED)
    demands = [Demand("a", 9, (8, 9, 10)), Demand("b", 2)]
    assert [draft.token_ids for draft in drafter.propose(demands)] == [
        reference.draft(tokens, 10, SAMPLED, 9, (8, 9, 10))[0],
        reference.draft(tokens, 10, SAMPLED, 2)[0],
    ]
    (nothing,) = drafter.propose([Demand("a", 3, (1,) * BLOCK)])
    assert nothing.token_ids == ()


def test_requests_without_computed_features_get_empty_drafts(vanilla: Path, target: Path, model: CausalModel) -> None:
    drafter = make_dspark(vanilla, target, model=model)
    tokens = text(3, 50)
    drafter.open("late", tokens, 10, GREEDY)
    drafter.open("there", tokens, 10, GREEDY)
    drafter.features.token_ids["late"] = tokens[:30]  # still being prefilled
    late, there = drafter.propose([Demand("late", 4), Demand("there", 4)])
    assert (len(late.token_ids), len(there.token_ids)) == (0, 4)
    drafter.check_integrity()
    drafter.features.token_ids["late"] = tokens
    (late,) = drafter.propose([Demand("late", 4)])
    assert late.token_ids == there.token_ids


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "peagle"])
def test_contexts_are_computed_in_passes_of_bounded_length(
    kind: Any, target: Path, model: CausalModel, tmp_path: Path
) -> None:
    """What a pass takes of a GPU's memory is bounded. In pieces a context gives the same drafts."""
    write_speculators(tmp_path, target, kind)
    found, passes = [], []
    for most in (2048, 16):
        made = make_dspark(tmp_path, target, model=model)
        for i, length in enumerate((70, 12, 9)):
            made.open(str(i), text(i, length), 5, SAMPLED)
        stage = made.drafter._stage
        bounded = mock.patch("drafters.hidden_states.drafter._MAX_ROWS", most)
        with bounded, mock.patch.object(stage, "begin", wraps=stage.begin) as begin:
            found.append([draft.token_ids for draft in made.propose([Demand(name, 4) for name in "012"])])
        passes.append([sum(one.last - one.start for one in call.args[0]) for call in begin.call_args_list])
        made.check_integrity()
    assert found[0] == found[1]
    assert len(passes[0]) == 1
    assert (max(passes[1]), sum(passes[1])) == (16, passes[0][0])


def test_evicted_contexts_are_projected_again(folder: Path, target: Path, model: CausalModel) -> None:
    """Room for two requests of 90 tokens, at three blocks each, and five of them."""
    drafters = [make_dspark(folder, target, num_blocks=n, model=model) for n in (7, 64)]
    for drafter in drafters:
        for i, name in enumerate("abcde"):
            drafter.open(name, text(i, 80), 10, SAMPLED)
    for _ in range(3):
        few, many = ([draft.token_ids for draft in d.propose([Demand(name, 4) for name in "abcde"])] for d in drafters)
        assert few == many
        for name, token_ids in zip("abcde", few, strict=True):
            for drafter in drafters:
                drafter.extend(name, token_ids)
                drafter.check_integrity()
    assert drafters[0].features.num_rows > drafters[1].features.num_rows


def test_calibrated_survival_ends_drafts(folder: Path, target: Path, model: CausalModel) -> None:
    whole, short = (make_dspark(folder, target, model=model, min_survival=m) for m in (0.0, 0.2))
    cold = make_dspark(folder, target, model=model, temperatures=(1.0, 3.0))
    has_head = json.loads((folder / "config.json").read_text())["enable_confidence_head"]
    lens = []
    for seed in range(6):
        tokens = text(seed, 40)
        for drafter in (whole, short, cold):
            drafter.open("a", tokens, 10, SAMPLED)
        (all_of_it,), (some,), (calibrated,) = (drafter.propose([Demand("a", BLOCK)]) for drafter in (whole, short, cold))
        survival, num_sure = 1.0, 0
        for confidence in all_of_it.confidences:
            survival *= confidence
            if survival < 0.2:
                break
            num_sure += 1
        assert some.token_ids == all_of_it.token_ids[:num_sure]
        assert calibrated.token_ids == all_of_it.token_ids
        lens.append(num_sure)
        logits = torch.tensor(all_of_it.confidences).logit()
        if has_head:
            expected = torch.sigmoid(logits / torch.tensor([1.0] + [3.0] * (BLOCK - 1)))
            assert calibrated.confidences == pytest.approx(expected.tolist(), abs=1e-3)
    assert len(set(lens)) > 1


def test_drafts_end_at_stop_tokens(vanilla: Path, target: Path, model: CausalModel) -> None:
    drafter = make_dspark(vanilla, target, model=model)
    sure = ((EOS, 100.0),)
    for params, expected in (
        (SamplingParams(max_tokens=20, temperature=0.0, logit_bias=sure), (EOS,)),
        (SamplingParams(max_tokens=20, temperature=0.0, logit_bias=sure, ignore_eos=True), (EOS,) * 4),
        (SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((7, 100.0),), stop_token_ids=(7,)), (7,)),
        (SamplingParams(40, 0.0, allowed_token_ids=(7,), stop_token_ids=(7,), min_tokens=40), ()),  # all masked
    ):
        drafter.open("r", text(1, 30), 10, params)
        drafter.open("s", text(1, 30), 10, GREEDY)
        draft, other = drafter.propose([Demand("r", 4), Demand("s", 4)])
        assert draft.token_ids == expected
        assert len(other.token_ids) == 4
        if expected and not params.ignore_eos:
            (further,) = drafter.propose([Demand("r", 2, draft.token_ids)])
            assert further.token_ids == ()


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_the_parallel_stage_in_bf16_is_the_same_by_one_call_a_layer(
    vanilla: Path, target: Path, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_network(vanilla, target_rows(target))
    found = []
    for by_one_call in (True, False):
        if not by_one_call:
            monkeypatch.setattr(CpuOps, "whole_layer", lambda self, parts: None)
        torch.manual_seed(1)
        stage = BlockStage(network, torch.bfloat16, torch.device("cpu"), int8=int8)
        assert all((layer._whole is not None) == by_one_call for layer in stage._layers)
        cache, tables = KvCache.allocate(stage.config.shape, 6, *stage.placement), np.arange(6, dtype=np.int32).reshape(2, 3)
        context = [PackedSpan(0, (0,) * length, table) for length, table in zip((40, 7), tables, strict=True)]
        stage.project(context, torch.randn(47, stage.config.feature_size).bfloat16(), cache)
        block = (9, *(stage.config.mask_token_id,) * (stage.config.block_size - 1))
        blocks = [PackedSpan(length, block, table) for length, table in zip((40, 7), tables, strict=True)]
        found.append(stage.run(blocks, None, cache))
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])  # each attends to its own context
