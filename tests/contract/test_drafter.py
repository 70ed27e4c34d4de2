"""One suite over every drafter: what a loop may rely on."""

import random
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cluster.config import (
    CascadeOptions,
    DrafterConfig,
    DrafterOptions,
    HiddenStateKind,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
)
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo
from drafters.native.lookup import lookups
from drafters.protocol import Demand, Draft, Drafter
from drafters.registry import Site, make, make_drafter
from drafters.table import count_frequencies
from engine.factory import load_model
from engine.forward import CausalModel
from engine.kv_blocks import BlockLedger
from engine.models.tokenizer import fingerprint
from tests.support.dspark import make_dspark, write_dspark, write_speculators
from tests.support.tiny_model import write_renamed, write_tiny_layers, write_tiny_model
from tests.support.with_proposers import WithProposers

VOCAB_SIZE = 257
NUM_LAYERS = 3
SAMPLING = SamplingParams(max_tokens=64, temperature=0.8, seed=11, top_p=0.9, repetition_penalty=1.2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
KINDS = (
    "ngram",
    "suffix",
    "table",
    "model",
    "shallow",
    "other-vocabulary",
    "layers",
    "dspark",
    "dspark-rnn",
    "dflash",
    "eagle3",
    "peagle",
    "chain",
    "lookup-chain",
    "long-chain",
    "layers-chain",
    "other-chain",
    "cascade",
    "lookup-cascade",
)
# What these draft depends on what they have learned from all requests, and that is their purpose.
LEARNING = ("cascade", "lookup-cascade")

Make = Callable[[], Drafter]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def layers_folder(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return write_tiny_layers(tmp_path_factory.mktemp("layers"), folder, token_ids=range(3, 250, 2))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A target of which 30 tokens are two of the drafter's each."""
    return write_renamed(tmp_path_factory.mktemp("wide") / "target", folder, {c: c + "~" for c in string.ascii_letters[:30]})


@pytest.fixture(scope="module")
def table_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "table.npz"
    count_frequencies([(text(seed), 10) for seed in range(8)] + [([1, 2, 3, 4, 5] * 8, 5)], 1000).save(path)
    return path


@pytest.fixture(scope="module")
def dspark_folders(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("dspark")
    reduced = write_dspark(at / "reduced", folder, draft_token_ids=list(range(3, 250, 2)))
    rnn = write_dspark(at / "rnn", folder, markov_head_type="rnn", anchor_input=True, enable_confidence_head=False)
    kinds: tuple[HiddenStateKind, ...] = ("dflash", "eagle3", "peagle")
    for kind in kinds:
        write_speculators(at / kind, folder, kind, draft_token_ids=tuple(range(3, 250, 2)))
    return {"dspark": reduced, "dspark-rnn": rnn} | {kind: at / kind for kind in kinds}


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load_model(folder, "float32")


@pytest.fixture(params=KINDS)
def make_one(
    request: pytest.FixtureRequest,
    folder: Path,
    layers_folder: Path,
    wide_folder: Path,
    dspark_folders: dict[str, Path],
    table_file: Path,
    model: CausalModel,
) -> Make:
    if request.param in dspark_folders:
        return lambda: make_dspark(dspark_folders[request.param], folder, num_blocks=17, model=model)
    return _make_one(request.param, folder, layers_folder, wide_folder, table_file)


def _make_one(kind: str, folder: Path, layers_folder: Path, wide_folder: Path, table_file: Path) -> Make:
    def model(num_layers: int) -> ModelOptions:
        return ModelOptions(model=str(folder), num_layers=num_layers, dtype="float32", kv_cache_gb=0.0002)

    other = model(2).of_target(str(wide_folder))
    lookups = (NgramOptions(), SuffixOptions(), TableOptions())
    layers = LayersOptions(path=str(layers_folder), dtype="float32", kv_cache_gb=0.0002, min_survival=0.0).of_target(
        str(folder)
    )
    options: dict[str, DrafterOptions] = {
        "table": TableOptions(path=str(table_file)),
        "layers": layers,
        "cascade": CascadeOptions(members=(*lookups, layers)),
        "lookup-cascade": CascadeOptions(members=lookups),
        "ngram": NgramOptions(),
        "suffix": SuffixOptions(),
        "model": model(NUM_LAYERS),
        "shallow": model(1),
        "other-vocabulary": other,
    }
    chains: dict[str, tuple[DrafterOptions, ...]] = {
        "other-chain": (NgramOptions(), other),
        "layers-chain": (layers, model(2)),
        "chain": (model(1), model(NUM_LAYERS)),
        "lookup-chain": (NgramOptions(), model(2)),
        "long-chain": (NgramOptions(), model(1), model(2)),
    }
    tokenizer = wide_folder if kind.startswith("other") else folder
    target = ModelInfo("tiny", VOCAB_SIZE, 512, (VOCAB_SIZE - 1,), fingerprint(tokenizer))
    if kind in chains:
        return lambda: _chain(chains[kind], target)
    return lambda: make(options[kind], Site(target, "cpu"))


def _chain(levels: Sequence[DrafterOptions], target: ModelInfo) -> Drafter:
    """A chain of the pool in which every request has all ``levels``, smallest first."""
    configs = [DrafterConfig(name=f"level-{i}", options=options) for i, options in enumerate(levels)]
    drafter = make_drafter(configs[-1], target, proposers=configs[:-1])
    return WithProposers(drafter, [config.name for config in configs[:-1]])


@pytest.fixture
def independent(request: pytest.FixtureRequest) -> None:
    """For tests in which requests must not matter to each other."""
    if request.node.callspec.params["make_one"] in LEARNING:
        pytest.skip("it learns from all requests")


@pytest.fixture
def drafter(make_one: Make) -> Iterator[Drafter]:
    drafter = make_one()
    yield drafter
    drafter.check_integrity()


def text(seed: int, length: int = 40) -> list[int]:
    """Tokens in which phrases recur, so that lookups find something."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(VOCAB_SIZE - 1) for _ in range(5)] for _ in range(3)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases)
    return tokens[:length]


def propose(drafter: Drafter, *demands: Demand) -> list[Draft]:
    """Drafts that keep the protocol."""
    drafts = drafter.propose(demands)
    assert [draft.request_id for draft in drafts] == [demand.request_id for demand in demands]
    for demand, draft in zip(demands, drafts, strict=True):
        assert len(draft.token_ids) <= max(0, demand.num_tokens)
        assert len(draft.confidences) == len(draft.token_ids)
        assert all(0 <= token_id < VOCAB_SIZE for token_id in draft.token_ids)
        assert all(0.0 < confidence <= 1.0 for confidence in draft.confidences)
    drafter.check_integrity()
    return drafts


def ids(drafts: list[Draft]) -> list[tuple[int, ...]]:
    return [draft.token_ids for draft in drafts]


def test_drafts_something_for_a_text_that_repeats_itself(drafter: Drafter) -> None:
    drafter.open("a", [1, 2, 3, 4, 5] * 8, 20, GREEDY)
    (draft,) = propose(drafter, Demand("a", 6))
    assert draft.token_ids


@pytest.mark.usefixtures("independent")
def test_a_batch_gets_what_its_demands_would_get_alone(make_one: Make) -> None:
    texts = {f"r{i}": (text(i, 20 + 7 * i), GREEDY if i % 2 else SAMPLING) for i in range(5)}
    demands = [Demand(request_id, 1 + i) for i, request_id in enumerate(texts)]
    together = make_one()
    for request_id, (token_ids, sampling) in texts.items():
        together.open(request_id, token_ids, 10, sampling)
    alone = []
    for demand in demands:
        drafter = make_one()
        token_ids, sampling = texts[demand.request_id]
        drafter.open(demand.request_id, token_ids, 10, sampling)
        alone += propose(drafter, demand)
    assert ids(propose(together, *demands)) == ids(alone)


def test_the_same_demand_gets_the_same_draft_again(drafter: Drafter) -> None:
    drafter.open("a", text(1), 10, SAMPLING)
    assert ids(propose(drafter, Demand("a", 5))) == ids(propose(drafter, Demand("a", 5)))


@pytest.mark.usefixtures("independent")
def test_interleaved_requests_do_not_disturb_each_other(make_one: Make) -> None:
    def rounds(drafter: Drafter, names: list[str]) -> dict[str, list[tuple[int, ...]]]:
        rng = {name: random.Random(name) for name in names}
        said: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
        for name in names:
            drafter.open(name, text(len(name)), 10, SAMPLING)
        for i in range(12):
            for name in names:
                if (i + len(name)) % 3:
                    (draft,) = propose(drafter, Demand(name, 4))
                    said[name].append(draft.token_ids)
                    kept = rng[name].randint(0, len(draft.token_ids))
                    drafter.extend(name, [*draft.token_ids[:kept], rng[name].randrange(VOCAB_SIZE - 1)])
        return said

    names = ["a", "bb", "ccc"]
    together = rounds(make_one(), names)
    assert together == {name: rounds(make_one(), [name])[name] for name in names}


@pytest.mark.usefixtures("independent")
def test_extending_and_opening_anew_come_to_the_same(make_one: Make) -> None:
    whole, grown = make_one(), make_one()
    tokens = text(3, 60)
    whole.open("a", tokens, 10, SAMPLING)
    grown.open("a", tokens[:30], 10, SAMPLING)
    for start in range(30, 60, 6):
        propose(grown, Demand("a", 3))
        grown.extend("a", tokens[start : start + 6])
    assert ids(propose(grown, Demand("a", 7))) == ids(propose(whole, Demand("a", 7)))


@pytest.mark.usefixtures("independent")
def test_opening_what_is_open_starts_it_over(make_one: Make) -> None:
    fresh, used = make_one(), make_one()
    used.open("a", text(4, 50), 10, SAMPLING)
    propose(used, Demand("a", 5))
    for drafter in (fresh, used):
        drafter.open("a", [1, 2, 3, 9, 8, 1, 2, 3], 4, GREEDY)
    assert ids(propose(used, Demand("a", 5))) == ids(propose(fresh, Demand("a", 5)))


def test_released_requests_may_come_back(drafter: Drafter) -> None:
    drafter.release("never seen")
    drafter.open("a", text(5), 40, SAMPLING)  # nothing of the output yet: suffix shares none of it
    before = ids(propose(drafter, Demand("a", 5)))
    drafter.release("a")
    drafter.release("a")
    drafter.check_integrity()
    drafter.open("a", text(5), 40, SAMPLING)
    assert ids(propose(drafter, Demand("a", 5))) == before


@pytest.mark.parametrize("num_tokens", [0, -3, 1000])
def test_demands_of_any_size_are_answered(drafter: Drafter, num_tokens: int) -> None:
    drafter.open("a", [1, 2, 3] * 10, 5, GREEDY)
    drafter.open("b", text(6), 5, SAMPLING)
    propose(drafter, Demand("a", num_tokens), Demand("b", 3))


def test_drafts_go_on_behind_what_was_drafted_before(drafter: Drafter) -> None:
    drafter.open("a", [1, 2, 3, 4, 5] * 8, 20, GREEDY)
    (first,) = propose(drafter, Demand("a", 3))
    (rest,) = propose(drafter, Demand("a", 3, first.token_ids))
    (whole,) = propose(drafter, Demand("a", 6))
    assert first.token_ids + rest.token_ids == whole.token_ids


@pytest.mark.usefixtures("independent")
def test_any_tokens_may_stand_ahead(make_one: Make) -> None:
    """A chain's verifier corrects what its proposer drafted, and asks on from there."""
    drafter, fresh = make_one(), make_one()
    tokens, ahead = text(7), (5, 6, 7)
    drafter.open("a", tokens, 10, GREEDY)
    propose(drafter, Demand("a", 5))
    drafted = propose(drafter, Demand("a", 4, ahead))
    fresh.open("a", tokens, 10, GREEDY)
    assert ids(propose(fresh, Demand("a", 4, ahead))) == ids(drafted)
    drafter.extend("a", [5, 200])
    propose(drafter, Demand("a", 5))


ANSWER = random.Random(1).sample(range(4, VOCAB_SIZE - 1), 60)  # no token twice


def _taught(make_one: Make, salt: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, ...]], int]:
    """What a request with salt "own" gets after one with ``salt`` whose answer it quotes: its drafts, and how many cached
    tokens of the other it is given."""
    num_cached: list[int] = []
    open_cache = BlockLedger.open

    def open_and_record(ledger: BlockLedger, request_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        num_cached.append(open_cache(ledger, request_id, token_ids, salt))
        return num_cached[-1]

    drafter = make_one()
    with monkeypatch.context() as patch:
        patch.setattr(BlockLedger, "open", open_and_record)
        if salt:
            drafter.open("other", [1, 2, 3], 3, GREEDY, salt)
            for start in range(0, 60, 20):
                drafter.extend("other", ANSWER[start : start + 20])
                propose(drafter, Demand("other", 1))  # computes, and caches what the one before computed
            drafter.release("other")
        num_cached.clear()
        drafter.open("mine", [1, 2, 3, *ANSWER[:40]], 3, GREEDY, "own")
        drafts = propose(drafter, Demand("mine", 8))
    drafter.release("mine")
    return ids(drafts), max(num_cached, default=0)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["make_one"])


def test_nothing_that_a_salt_taught_or_cached_serves_another(
    make_one: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cascade, which member drafts depends on the gains of all requests, but what it drafts does not."""
    (drafts, num_cached), (alone, _) = (_taught(make_one, salt, monkeypatch) for salt in ("another", ""))
    assert num_cached == 0
    assert drafts == alone if kind not in LEARNING else drafts[0][:1] != (ANSWER[40],)


def test_control_it_serves_the_same_salt(make_one: Make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the lookups without a memory, so the test above can fail."""
    drafts, num_cached = _taught(make_one, "own", monkeypatch)
    if (kind == "suffix" or kind in LEARNING) and lookups() is not None:  # ngram stands for them without a compiler
        assert drafts[0][:1] == (ANSWER[40],)
    assert (num_cached > 0) == (kind not in ("ngram", "suffix", "table", "lookup-cascade", "cascade"))


def test_texts_as_long_as_the_model_are_answered(drafter: Drafter) -> None:
    for length in (510, 511, 512):
        drafter.open("a", text(8, length), 10, GREEDY)
        propose(drafter, Demand("a", 4))
    drafter.extend("a", text(9, 30))
    propose(drafter, Demand("a", 4), Demand("a", 0))


@pytest.mark.parametrize("seed", range(3))
def test_stays_whole_whatever_happens(drafter: Drafter, seed: int) -> None:
    """The cache of the whole model holds 544 tokens, the requests up to 1,000: they lose theirs again and again."""
    rng = random.Random(seed)
    lens: dict[str, int] = {}
    for _ in range(40):
        name = rng.choice("abcdef")
        action = rng.random()
        if action < 0.2 or name not in lens:
            tokens = text(rng.randrange(100), rng.randint(1, 120))
            drafter.open(name, tokens, rng.randint(0, len(tokens)), rng.choice([GREEDY, SAMPLING]))
            lens[name] = len(tokens)
        elif action < 0.3:
            drafter.release(name)
            del lens[name]
        elif action < 0.5:
            tokens = text(rng.randrange(100), rng.randint(1, 9))
            drafter.extend(name, tokens)
            lens[name] += len(tokens)
        else:
            names = rng.sample(sorted(lens), rng.randint(1, len(lens)))
            demands = [Demand(n, rng.randint(0, 9), tuple(text(rng.randrange(9), rng.randint(0, 4)))) for n in names]
            for demand, draft in zip(demands, propose(drafter, *demands), strict=True):
                if rng.random() < 0.7 and draft.token_ids:
                    kept = (*demand.ahead, *draft.token_ids)[: rng.randint(1, 9)]
                    drafter.extend(demand.request_id, kept)
                    lens[demand.request_id] += len(kept)
        drafter.check_integrity()
    for name in lens:
        drafter.release(name)
