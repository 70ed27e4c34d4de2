"""A drafter with another tokenizer than its target's: the same text, tokens of its own."""

import random
from pathlib import Path

import pytest

from benchmarks.made_drafters import under_another_vocabulary
from cluster.config import DrafterConfig, ModelOptions
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo
from drafters.model import ModelDrafter
from drafters.other_vocabulary import OtherVocabulary
from drafters.protocol import Demand, Drafter
from drafters.registry import make_drafter
from engine.models.config import load_config
from engine.models.tokenizer import fingerprint
from tests.support.tiny_model import END, write_renamed, write_tiny_model
from tests.unit.test_drafters_model import GREEDY, PENALIZED, PROMPT, SAMPLED, VOCAB_SIZE, plain_run, ride

EOS = VOCAB_SIZE - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


def drafter_of(model: Path, target: Path) -> Drafter:
    info = ModelInfo("tiny", VOCAB_SIZE, 512, (EOS,), fingerprint(target))
    options = ModelOptions(model=str(model), dtype="float32", kv_cache_gb=0.01).of_target(str(target))
    return make_drafter(DrafterConfig(name="d", options=options), info)


@pytest.mark.parametrize("sampling", [PENALIZED, SAMPLED, GREEDY])
def test_the_target_under_another_vocabulary_is_always_right(folder: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    """With its own noise, and the end of the sequence under another name."""
    ids = random.Random(3).sample(range(VOCAB_SIZE), VOCAB_SIZE)
    renamed = write_renamed(tmp_path / "renamed", folder, {END: "<stop>"}, ids)
    output = plain_run(folder, sampling)
    drafted, accepted = ride(drafter_of(renamed, folder), output, sampling, 5)
    assert drafted == accepted > 60


def test_drafts_end_with_the_targets_end(folder: Path, tmp_path: Path) -> None:
    ids = random.Random(3).sample(range(VOCAB_SIZE), VOCAB_SIZE)
    drafter = drafter_of(write_renamed(tmp_path / "renamed", folder, {END: "<stop>"}, ids), folder)
    drafter.open("r", PROMPT, len(PROMPT), SamplingParams(max_tokens=80, temperature=0.0, logit_bias=((EOS, 100.0),)))
    (draft,) = drafter.propose([Demand("r", 4)])
    assert draft.token_ids == (EOS,)


def test_tokens_that_the_drafter_has_not_are_read_as_their_bytes(folder: Path, tmp_path: Path) -> None:
    """As if it had been told the text by its own tokens."""
    wide = write_renamed(tmp_path / "wide", folder, {"A": "AB", "C": "CDE"})
    apart, whole = drafter_of(folder, wide), drafter_of(folder, folder)
    ids = {chr(code): code - ord("!") for code in range(ord("A"), ord("F"))}  # the byte alphabet begins with "!"
    told, spelled = [], []
    for token_id in [*PROMPT, ids["A"], 7, ids["C"], 8]:
        told.append(token_id)
        spelled += {ids["A"]: [ids["A"], ids["B"]], ids["C"]: [ids["C"], ids["D"], ids["E"]]}.get(token_id, [token_id])
    apart.open("r", told[:50], 50, GREEDY)
    apart.propose([Demand("r", 4)])
    apart.extend("r", told[50:])
    whole.open(
        "r", spelled, 50, SamplingParams(80, 0.0, ignore_eos=True, logit_bias=((ids["A"], -100.0), (ids["C"], -100.0)))
    )
    (of_apart,), (of_whole,) = apart.propose([Demand("r", 6)]), whole.propose([Demand("r", 6)])
    assert of_apart.token_ids == of_whole.token_ids != ()
    apart.check_integrity()
    assert isinstance(apart, ModelDrafter)
    assert apart._model.readable((7, ids["C"], 8)) == (7, ids["C"], 8)
    assert apart._model.choosable((7, ids["C"], 8)) == (7,), "what a smaller model proposes is never more rows than tokens"


def test_tokens_of_equal_bytes_stand_for_each_other() -> None:
    """SentencePiece's byte tokens come before the pieces that it chooses; control tokens are matched by name."""
    vocabulary = OtherVocabulary(
        own=(b"", b"a", b"b", b"a", b"", b"bc", b""),
        target=(b"a", b"c", b"bcb", b"", b"a", b"", b"", b"bx"),
        own_controls={0: "<s>", 4: "</s>", 6: "<end>"},  # the last pads
        target_controls={3: "<s>", 5: "<end>", 6: "ab"},
        own_ends=(4,),
        target_ends=(5,),
    )
    assert vocabulary.output_ids.tolist() == [3, 4, 5]
    assert vocabulary.columns.tolist() == [0, 3, 4]
    assert vocabulary.own([0, 4, 2, 3, 5, 6]) == (3, 3, 5, 2, 0, 4, 3, 2)
    assert vocabulary.own([1]) == vocabulary.own([7]) == vocabulary.own([99]) == ()


@pytest.mark.model
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_real_target_renumbered_and_with_a_part_of_its_vocabulary(model_folder: Path, sampling: SamplingParams) -> None:
    """All of its tokens under other numbers: always right. With single bytes alone it misses the others."""
    config = load_config(model_folder)
    target = ModelInfo("target", config.vocab_size, 512, config.eos_token_ids, fingerprint(model_folder))
    output, shares = plain_run(model_folder, sampling, 32), []
    for share in (1.0, 0.0):
        drafted, accepted = ride(under_another_vocabulary(model_folder, target, share), output, sampling, 5)
        shares.append(accepted / drafted)
    assert shares[0] == 1.0 > shares[1] > 0.1
