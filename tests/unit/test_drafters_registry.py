"""Which drafters are made of which configuration, and which are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import (
    CascadeOptions,
    DrafterConfig,
    DrafterOptions,
    LayersOptions,
    ModelOptions,
    NgramOptions,
    SuffixOptions,
    TableOptions,
)
from cluster.errors import IncompatibleTokenizer, InvalidField, ModelUnavailable
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo
from drafters.cascade import CascadeDrafter
from drafters.model import ModelDrafter
from drafters.native.lookup import NativeLookup, lookups
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Draft
from drafters.registry import make_drafter
from drafters.table import FILE as TABLE_FILE
from drafters.table import count_frequencies
from engine.models.tokenizer import fingerprint, read_vocabulary
from profiler.calibration import FILE as CALIBRATION_FILE
from profiler.calibration import Calibration, TemperatureScaling, save_calibration
from tests.support.tiny_model import write_renamed, write_tiny_layers, write_tiny_model
from tests.support.word_model import write_wordy_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def target_of(folder: Path) -> ModelInfo:
    return ModelInfo(str(folder), 257, 512, (256,), fingerprint(folder))


def made(options: DrafterOptions, target: ModelInfo) -> object:
    return make_drafter(DrafterConfig(name="d", options=options), target)


def is_lookup(drafter: object, kind: str) -> bool:
    """In C; `ngram` in Python without a compiler."""
    return (
        isinstance(drafter, NgramDrafter)
        if lookups() is None
        else isinstance(drafter, NativeLookup) and drafter.kind == kind
    )


def test_makes_every_kind(folder: Path) -> None:
    target = target_of(folder)
    model = ModelOptions(model=str(folder), dtype="float32", kv_cache_gb=0.001, num_layers=1)
    assert is_lookup(made(NgramOptions(), target), "ngram")
    assert is_lookup(made(SuffixOptions(), target), "suffix")
    assert isinstance(made(model, target), ModelDrafter)


def test_makes_the_trained_kinds(folder: Path, tmp_path: Path) -> None:
    target = target_of(folder)
    write_tiny_layers(tmp_path / "trained", folder, range(5, 100))
    layers = LayersOptions(path=str(tmp_path / "trained"), dtype="float32", kv_cache_gb=0.001)
    assert isinstance(made(layers, target), ModelDrafter)
    assert isinstance(made(layers.of_target(str(folder)), target), ModelDrafter)
    assert isinstance(made(CascadeOptions(members=(NgramOptions(), layers)), target), CascadeDrafter)
    (tmp_path / "table").mkdir()
    count_frequencies([((1, 2, 3), 0)] * 3, 10).save(tmp_path / "table" / TABLE_FILE)
    for path in (None, str(tmp_path / "table"), str(tmp_path / "table" / TABLE_FILE)):
        assert is_lookup(made(TableOptions(path=path), target), "table")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_drafts_what_its_verifier_would_by_itself_and_is_as_sure_of_it(
    folder: Path, tmp_path: Path, temperature: float
) -> None:
    """Where its draft ends, and how its confidences are calibrated, is the verifier's to say."""
    target = target_of(folder)
    trained = write_tiny_layers(tmp_path / "trained", folder, range(0, 250, 2), num_layers=1)
    alone = LayersOptions(path=str(trained), dtype="float32", kv_cache_gb=0.001, min_survival=0.3)
    endless = alone.model_copy(update={"min_survival": 0.0})
    sampling = SamplingParams(max_tokens=200, temperature=temperature, seed=3, ignore_eos=True)
    prompts = {f"r{i}": tuple(range(20 + i, 50 + i)) for i in range(6)}

    def drafts(options: DrafterOptions, proposer: DrafterOptions | None = None) -> list[Draft]:
        below = [] if proposer is None else [DrafterConfig(name="below", options=proposer)]
        drafter = make_drafter(DrafterConfig(name="d", options=options), target, proposers=below)
        for name, prompt in prompts.items():
            drafter.open(name, prompt, len(prompt), sampling)
            if proposer is not None:
                chain = drafter.capabilities.chain
                assert chain is not None
                assert chain.set_proposers(name, ("below",))
        return drafter.propose([Demand(name, 7) for name in prompts])

    raw = drafts(endless, NgramOptions())
    fits = {0.0: TemperatureScaling((2.0, 0.5, 1.5)), 0.8: TemperatureScaling((3.0,), (-1.0,))}
    save_calibration(Calibration(fits), trained / CALIBRATION_FILE)
    expected = drafts(alone)
    for proposer in (NgramOptions(), endless):
        found = drafts(alone, proposer)
        assert [draft.token_ids for draft in found] == [draft.token_ids for draft in expected]
        for draft, own in zip(found, expected, strict=True):
            assert draft.confidences == pytest.approx(own.confidences, rel=1e-4)
    assert sum(len(draft.token_ids) for draft in expected) < sum(len(draft.token_ids) for draft in raw), "none ended early"
    for own, whole in zip(expected, raw, strict=True):
        by_its_temperature = fits[temperature].conditional(whole.confidences[:1])
        assert own.confidences[:1] == pytest.approx(by_its_temperature, rel=1e-4)
        assert own.confidences[0] != pytest.approx(whole.confidences[0])


def test_refuses_trained_drafters_that_cannot_work(folder: Path, tmp_path: Path) -> None:
    target = target_of(folder)
    with pytest.raises(ModelUnavailable, match="nowhere: no folder of a trained drafter"):
        made(TableOptions(path="nowhere"), target)
    trained = write_tiny_layers(tmp_path / "trained", folder, [7, 5])
    with pytest.raises(ModelUnavailable, match="ascending"):
        made(LayersOptions(path=str(trained), dtype="float32"), target)
    write_tiny_layers(trained, folder, [5, 7])
    wide = write_tiny_model(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ModelUnavailable, match="width 64"):
        made(LayersOptions(path=str(trained), dtype="float32").of_target(str(wide)), target)
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | {"tokenizer_fingerprint": "0"}))
    with pytest.raises(IncompatibleTokenizer, match="another tokenizer"):
        made(LayersOptions(path=str(trained), dtype="float32"), target)
    table = tmp_path / TABLE_FILE
    replace(count_frequencies([((1, 2, 3), 0)] * 3, 10), vocab_size=257, tokenizer_fingerprint="0").save(table)
    with pytest.raises(IncompatibleTokenizer, match="another tokenizer"):
        made(TableOptions(path=str(table)), target)


def test_refuses_what_cannot_work(folder: Path) -> None:
    target = target_of(folder)
    with pytest.raises(InvalidField, match="kv_cache_gb"):
        made(ModelOptions(model=str(folder), kv_cache_gb=1e-9), target)
    with pytest.raises(ModelUnavailable, match="num_layers"):
        made(ModelOptions(model=str(folder), num_layers=3), target)
    with pytest.raises(ModelUnavailable, match="nowhere"):
        made(ModelOptions(model=str(folder / "nowhere")), target)


def test_a_target_whose_tokenizer_cannot_be_read_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    other = write_renamed(tmp_path / "other", folder, {"a": "ab"})
    elsewhere = ModelInfo("elsewhere", 257, 512, (256,), fingerprint(other))
    with pytest.raises(ModelUnavailable, match="elsewhere: neither a folder"):
        made(ModelOptions(model=str(folder)), elsewhere)
    with pytest.raises(IncompatibleTokenizer, match="another tokenizer than the one that elsewhere is served with"):
        made(ModelOptions(model=str(folder)).of_target(str(folder)), elsewhere)
    wordy = write_wordy_model(tmp_path / "wordy")
    with pytest.raises(ModelUnavailable, match="the tokenizer has no decoder"):
        made(ModelOptions(model=str(wordy)), target_of(folder))
    (other / "tokenizer.json").unlink()
    for option in (ModelOptions(model=str(folder)).of_target(str(other)), ModelOptions(model=str(other))):
        with pytest.raises(ModelUnavailable, match=r"tokenizer\.json is missing"):
            made(option, elsewhere)


def test_layers_are_refused_for_a_target_with_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    trained = write_tiny_layers(tmp_path / "trained", folder, range(5, 100))
    other = write_renamed(tmp_path / "other", folder, {"a": "ab"})
    with pytest.raises(IncompatibleTokenizer, match="is not that of"):
        made(LayersOptions(path=str(trained)).of_target(str(folder)), target_of(other))


def test_how_text_becomes_ids_does_not_matter_what_they_mean_does(folder: Path, tmp_path: Path) -> None:
    other = write_renamed(tmp_path / "other", folder, {})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for edited in (
        {"normalizer": {"type": "NFC"}},
        {"model": tokenizer["model"] | {"vocab": dict(reversed(tokenizer["model"]["vocab"].items()))}},
    ):
        (other / "tokenizer.json").write_text(json.dumps(tokenizer | edited))
        assert fingerprint(other) == fingerprint(folder)
    unspecial = [token | {"special": False} for token in tokenizer["added_tokens"]]
    for edited in ({"added_tokens": unspecial}, {"model": tokenizer["model"] | {"merges": [["a", "b"]]}}):
        (other / "tokenizer.json").write_text(json.dumps(tokenizer | edited))
        assert fingerprint(other) != fingerprint(folder)


def test_merges_may_be_written_as_pairs_or_as_text_and_pieces_as_a_list(tmp_path: Path) -> None:
    def written(model: dict[str, Any], name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"added_tokens": None, "model": model}))
        return tmp_path / name

    vocab = {"a": 0, "b": 1, "ab": 2}
    pairs = written({"vocab": vocab, "merges": [["a", "b"]]}, "pairs")
    text = written({"vocab": vocab, "merges": ["a b"]}, "text")
    unigram = written({"vocab": [["a", -1.0], ["b", -2.0], ["ab", -3.0]]}, "unigram")
    assert fingerprint(pairs) == fingerprint(text)
    assert read_vocabulary(unigram).tokens == read_vocabulary(text).tokens
    other = written({"vocab": vocab, "merges": ["b a"]}, "other")
    assert fingerprint(other) != fingerprint(text)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "x"}}}'])
def test_a_broken_tokenizer_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json .*half-written"):
        fingerprint(tmp_path)


def test_a_missing_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="missing"):
        fingerprint(tmp_path)
