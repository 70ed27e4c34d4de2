"""A model with proposers: the same drafts, shared passes, and chains that change while a request runs."""

import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import (
    Config,
    DrafterConfig,
    LayersOptions,
    ModelConfig,
    ModelOptions,
    NgramOptions,
    PolicyConfig,
    RouterConfig,
    TargetConfig,
)
from cluster.resolve import Inventory, Node, resolve
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo, Request, RoutingTable
from drafters.draft_stops import DraftStops
from drafters.model import ModelDrafter
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Drafter
from drafters.registry import make_drafter
from drafters.similarity import EAGER_ROUNDS, Comparison
from drafters.small_model import SmallModel
from engine.acceptance import common_prefix_len
from engine.batch_layout import PackedSpan
from engine.factory import load_model
from engine.loading import load_target
from engine.models.tokenizer import fingerprint
from router.cost_model import TableCost
from router.drafter.chains import LearnedWindow
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

pytestmark = [pytest.mark.usefixtures("known_costs"), pytest.mark.slow]  # together they take seconds

VOCAB_SIZE = 257
PROMPT = tuple(range(40, 90))
SAMPLED = SamplingParams(max_tokens=80, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


def small_model(folder: Path, num_layers: int | None = None, num_blocks: int = 64) -> SmallModel:
    model = load_model(folder, "float32", num_layers=num_layers)
    return SmallModel(model, num_blocks=num_blocks, vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,))


def pool(folder: Path, verifier: SmallModel) -> ModelDrafter:
    """ngram, shallow (two layers) and twin (the verifier's own weights) may ride ahead; ngram ahead of shallow, too."""
    ngram = NgramDrafter()
    shallow = ModelDrafter(small_model(folder, 2), {"ngram": ngram})
    return ModelDrafter(verifier, {"ngram": ngram, "shallow": shallow, "twin": ModelDrafter(small_model(folder))})


CHAINS = [(), ("ngram",), ("shallow",), ("ngram", "shallow"), ("twin",), ("unknown",), ("ngram", "twin")]


@pytest.mark.slow
def test_changing_proposers_never_changes_the_drafts(folder: Path) -> None:
    led, alone = pool(folder, small_model(folder)), ModelDrafter(small_model(folder))
    rng = random.Random(4)
    names = "abcdefg"
    for drafter in (led, alone):
        for i, name in enumerate(names):
            drafter.open(name, PROMPT[: 20 + i], 10, SAMPLED)
    for _ in range(8):
        for name in names:
            if rng.random() < 0.5:
                chain = rng.choice(CHAINS)
                assert led.set_proposers(name, chain) == (chain not in (("unknown",), ("ngram", "twin")))
        demands = [Demand(name, rng.randint(0, 7)) for name in names]
        drafts = led.propose(demands)
        assert drafts
        assert [d.token_ids for d in drafts] == [d.token_ids for d in alone.propose(demands)]
        for draft in drafts:
            kept = (*draft.token_ids[: rng.randint(0, 6)], rng.randrange(256))
            led.extend(draft.request_id, kept)
            alone.extend(draft.request_id, kept)
        led.check_integrity()
    for name in names:
        led.release(name)
    led.check_integrity()


def test_requests_with_different_proposers_share_the_passes_of_their_verifier(folder: Path) -> None:
    verifier = small_model(folder)
    led = pool(folder, verifier)
    for name, chain in (("led", ("twin",)), ("also", ("twin",)), ("looked-up", ("ngram",))):
        led.open(name, PROMPT, len(PROMPT), SAMPLED)
        led.set_proposers(name, chain)
    led.propose([Demand(name, 5) for name in ("led", "also", "looked-up")])
    few = verifier.num_passes
    assert few <= 5  # the slowest draft's, and not the sum: a token at least in each
    led.take_levels("me")
    led.extend("led", (3,))
    led.extend("also", (3,))
    led.propose([Demand("led", 5), Demand("also", 5)])
    assert verifier.num_passes - few == 1  # the twin is right: four tokens verified, and one more


def test_it_reports_what_its_proposers_got_right(folder: Path) -> None:
    led = pool(folder, small_model(folder))
    for name, chain in (("a", ("twin",)), ("b", ("ngram", "shallow"))):
        led.open(name, PROMPT, len(PROMPT), SAMPLED)
        led.set_proposers(name, chain)
    led.propose([Demand("a", 5), Demand("b", 5)])
    reports = {report.drafter: report for report in led.take_levels("me")}
    assert set(reports) == {"me", "shallow"}
    verified = {one.proposer: one for one in reports["me"].verified}
    assert verified["twin"].num_right == verified["twin"].num_reached == (1, 1, 1, 1)
    assert (verified["twin"].num_asked, verified["twin"].num_proposed) == (4, 4)
    looked_up = reports["shallow"].verified[0]
    assert looked_up.num_proposed < looked_up.num_asked, "it knows little of this text"
    assert reports["me"].num_passes >= 1
    assert reports["me"].num_rows >= 5
    assert [one.proposer for one in reports["shallow"].verified] == ["ngram"]
    assert led.take_levels("me") == []  # it was told once


def distributions(folder: Path, num_layers: int | None, token_ids: tuple[int, ...]) -> torch.Tensor:
    """After each of the tokens, at the temperature of SAMPLED."""
    model = load_model(folder, "float32", num_layers=num_layers)
    cache = model.new_cache(16)
    span = PackedSpan(0, token_ids, np.arange(16, dtype=np.int32))
    return (model.logits(model.forward([span], cache))[:, :VOCAB_SIZE] / SAMPLED.temperature).softmax(-1)


@pytest.mark.parametrize("chain", [("shallow",), ("ngram", "shallow"), ("twin",)])
def test_it_compares_the_distributions_of_neighbours_in_one_process(folder: Path, chain: tuple[str, ...]) -> None:
    """At the tokens that its proposer drafted, as far as they were right, and the first wrong one."""
    led = pool(folder, small_model(folder))
    led.open("a", PROMPT, len(PROMPT), SAMPLED)
    led.set_proposers("a", chain)
    own_layers = 2 if "shallow" in chain else None
    proposer = ModelDrafter(small_model(folder, own_layers))
    proposer.open("a", PROMPT, len(PROMPT), SAMPLED)
    (draft,) = led.propose([Demand("a", 5)])
    (verified,) = led.take_levels("me")[0].verified
    wanted, num = [], 0
    while num < 4:
        (proposed,) = proposer.propose([Demand("a", 4 - num, draft.token_ids[:num])])
        num_right = common_prefix_len(proposed.token_ids, draft.token_ids[num:])
        given, reached = (*PROMPT, *draft.token_ids[:num], *proposed.token_ids[:-1]), min(num_right + 1, 4 - num)
        p, q = (distributions(folder, layers, given)[-(4 - num) :][:reached] for layers in (own_layers, None))
        wanted += (1.0 - (p - q).abs().sum(-1) / 2).tolist()
        num += num_right + 1
    assert verified.num_compared == len(wanted) == sum(verified.num_reached)
    assert verified.overlap == pytest.approx(sum(wanted), abs=1e-4)
    assert (verified.overlap == pytest.approx(4.0)) == (chain == ("twin",))


def test_passes_that_compare_distributions_are_not_timed(folder: Path) -> None:
    """A comparison takes 100 s here, and a pass nothing."""
    now_s, compared = 0.0, Comparison.note

    def slow(self: Comparison, rows: torch.Tensor) -> None:
        nonlocal now_s
        now_s += 100.0
        compared(self, rows)

    led = ModelDrafter(small_model(folder), {"twin": ModelDrafter(small_model(folder))}, clock=lambda: now_s)
    led.open("a", PROMPT, len(PROMPT), SAMPLED)
    led.set_proposers("a", ("twin",))
    with (
        mock.patch.object(Comparison, "note", slow),
        mock.patch.object(LearnedWindow, "learn") as learn,
        mock.patch.object(DraftStops, "note_step") as note_step,
    ):
        for _ in range(EAGER_ROUNDS + 8):
            led.propose([Demand("a", 5)])
            assert sum(report.busy_s for report in led.take_levels("me")) == 0.0
    assert now_s >= 100.0 * EAGER_ROUNDS
    assert {call.args[1:] for call in learn.call_args_list} == {(0.0, 0.0)}
    assert {call.args[1] for call in note_step.call_args_list} == {0.0}


def test_caches_that_are_given_up_are_counted(folder: Path) -> None:
    led = ModelDrafter(small_model(folder, num_blocks=4), {"ngram": NgramDrafter()})
    for name in "abc":
        led.open(name, [(7 * ord(name) + t) % 250 for t in range(60)], 10, SAMPLED)
        led.propose([Demand(name, 2)])
    (report,) = led.take_levels("me")
    assert report.num_lost > 0


def made(config: DrafterConfig, proposers: list[DrafterConfig], folder: Path) -> Drafter:
    target = ModelInfo("tiny", VOCAB_SIZE, 512, (VOCAB_SIZE - 1,), fingerprint(folder))
    return make_drafter(config, target, proposers=proposers)


def test_the_registry_makes_a_drafter_with_its_proposers(folder: Path, tmp_path: Path) -> None:
    layers = write_tiny_layers(tmp_path / "layers", folder, token_ids=range(3, 250, 2))
    ngram = DrafterConfig(name="ngram", options=NgramOptions())
    trained = DrafterConfig(
        name="layers", options=LayersOptions(path=str(layers), dtype="float32", kv_cache_gb=0.001).of_target(str(folder))
    )
    model = DrafterConfig(name="model", options=ModelOptions(model=str(folder), dtype="float32", kv_cache_gb=0.001))
    led, alone = made(model, [ngram, trained], folder), made(model, [], folder)
    chain = led.capabilities.chain
    assert chain is not None
    assert alone.capabilities.chain is None
    for drafter in (led, alone):
        drafter.open("r", PROMPT, len(PROMPT), SAMPLED)
    assert chain.set_proposers("r", ("ngram", "layers"))
    assert led.propose([Demand("r", 6)])[0].token_ids == alone.propose([Demand("r", 6)])[0].token_ids
    assert made(ngram, [], folder).capabilities.chain is None


def test_a_chain_of_three_drafters_serves_the_targets_own_tokens(folder: Path) -> None:
    """Through the configuration, the routing table, links and rounds; and its models tell what they verified."""
    models = [
        DrafterConfig(name=name, options=ModelOptions(model=str(folder), num_layers=n, dtype="float32", kv_cache_gb=0.001))
        for name, n in (("few", 1), ("more", 2))
    ]
    chain = ("ngram", "few", "more")
    config = Config(
        model=ModelConfig(name=str(folder), max_model_len=256),
        target=TargetConfig(dtype="float32", device="cpu", kv_cache_gb=0.01),
        drafters=(DrafterConfig(name="ngram", options=NgramOptions()), *models),
        router=RouterConfig(policy=PolicyConfig(kind="fixed", chain=chain)),
    )
    assert [one.name for one in config.proposers_of("more")] == ["ngram", "few"]
    assert config.proposers_of("few") == ()
    resolved = resolve(config, Inventory((Node("here", 2.0, 0.0),)))
    requests = [Request(f"r{i}", PROMPT[i:], replace(SAMPLED, max_tokens=40, seed=i), 0.0) for i in range(4)]
    engine, model, _ = load_target(resolved)
    pool = {
        one.name: PoolEntry(
            make_drafter(one, model, proposers=resolved.proposers_of(one.name)),
            proposers=tuple(below.name for below in resolved.proposers_of(one.name)),
        )
        for one in resolved.drafters
    }
    dear = TableCost((1, 64), (1000.0, 1000.0))  # as the planner believes: proposals are waited for
    table = RoutingTable(1, defaults=(chain,))
    with EmbeddedCluster(engine, model, dear, pool, StepPlanner(PlannerSettings("all", 60.0)), table) as cluster:
        found = cluster.complete(requests)
        assert sum(one.num_proposed for one in found) > 0
        alone = cluster.complete([replace(one, id=f"{one.id}-alone", chain=()) for one in requests])
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        reports = cluster.loop.telemetry.take_levels()
    pairs = {(verified.proposer, report.drafter) for report in reports for verified in report.verified}
    assert pairs == {("few", "more"), ("ngram", "few")}
