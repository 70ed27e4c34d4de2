"""Public layouts of drafters that read hidden states, made small: each is read as what it was written as, and drafts what
its network computes. What cannot be computed as it was trained is refused by name."""

import ast
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import HIDDEN_STATE_FORMS, HiddenStateKind
from cluster.errors import ModelUnavailable
from cluster.sampling_params import SamplingParams
from drafters.hidden_states.block_network import BlockNetwork
from drafters.hidden_states.checkpoint import load_network
from drafters.hidden_states.config import BlockConfig
from drafters.hidden_states.families import Network, make_network
from drafters.hidden_states.formats import read_config
from drafters.protocol import Demand
from drafters.shipped import kind_of
from engine.factory import load_model
from engine.forward import CausalModel
from tests.support.dspark import config_of_kind, make_dspark, target_rows, write_speculators
from tests.support.features import rows_of
from tests.support.tiny_model import write_tiny_model

VOCAB_SIZE, NUM_LAYERS = 257, 6
REDUCED = tuple(sorted(random.Random(3).sample(range(VOCAB_SIZE), 150)))
VARIANTS: dict[str, tuple[HiddenStateKind, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_token_ids": REDUCED, "norm_before_residual": True}),
    "eagle3-normed": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3-before-fc": ("eagle3", {"norm_before_fc": True}),
    "peagle": ("peagle", {"draft_token_ids": REDUCED}),
    "dflash": ("dflash", {"draft_token_ids": REDUCED}),
    "dspark": ("dspark", {"draft_token_ids": REDUCED, "confidence_with_markov": True}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=NUM_LAYERS, hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def model(target: Path) -> CausalModel:
    return load_model(target, "float32")


def same(one: Network, other: Network) -> None:
    assert type(one) is type(other)
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def written(folder: Path, target: Path, kind: HiddenStateKind, **changes: Any) -> tuple[Network, dict[str, Any]]:
    network = write_speculators(folder, target, kind, **changes)
    return network, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_in_the_speculators_format_drafts_as_its_network(
    name: str, tmp_path: Path, target: Path, model: CausalModel
) -> None:
    """Greedily, for two requests over several rounds, the first without a token of context."""
    kind, changes = VARIANTS[name]
    network, _ = written(tmp_path, target, kind, **changes)
    assert kind_of(tmp_path) == kind
    if not isinstance(network, BlockNetwork) or network.markov_head is None:  # whose W_1 has a row for each token as written
        same(load_network(tmp_path, target_rows(target)), network)
    drafter, rng = make_dspark(tmp_path, target, model=model), random.Random(1)
    texts = {name: [rng.randrange(250) for _ in range(length)] for name, length in (("a", 1), ("b", 40))}
    known = torch.tensor(network.config.draft_token_ids or range(VOCAB_SIZE))
    for name, token_ids in texts.items():
        drafter.open(name, token_ids, 1, SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        for (name, token_ids), draft in zip(
            texts.items(), drafter.propose([Demand(name, 6) for name in texts]), strict=True
        ):
            anchor = len(token_ids) - 1
            assert len(draft.token_ids) == (6 if anchor or isinstance(network, BlockNetwork) else 0)
            given = torch.tensor([*token_ids, *draft.token_ids])
            rows = rows_of(drafter.features, name, 0, anchor) if anchor else torch.empty(0, network.config.feature_size)
            features = torch.cat([rows, torch.full((len(given) - len(rows), rows.shape[1]), 9.0)])  # the rest is not read
            arguments = features, given, (len(given),), torch.tensor([anchor])
            for k, token_id in enumerate(draft.token_ids):
                if isinstance(network, BlockNetwork):
                    hidden = network(*arguments)
                    logits = network.logits(hidden, network.latents(hidden, given[anchor : anchor + 6][None]))
                else:
                    logits = network.logits(network(*arguments, 6))
                assert known[logits[0, k].argmax()] == token_id
            kept = [*draft.token_ids[: rng.randint(0, 3)], rng.randrange(250)]
            token_ids += kept
            drafter.extend(name, kept)
        drafter.check_integrity()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *VARIANTS.values(),
        ("eagle3", {"windows": (32,)}),
        ("dflash", {"windows": (16, None), "causal": (True, False)}),
        ("dflash", {"windows": (16, 16), "causal": (False, False)}),
    ],
)
def test_the_speculators_format_keeps_every_field(
    kind: HiddenStateKind, changes: dict[str, Any], tmp_path: Path, target: Path
) -> None:
    written_config = written(tmp_path, target, kind, **changes)[0].config
    found = read_config(tmp_path)
    kept: dict[str, Any] = {"shape": replace(written_config.shape, eos_token_ids=())}
    if isinstance(written_config, BlockConfig):
        assert isinstance(found, BlockConfig)
        assert found.attention == written_config.attention
        kept |= {"causal": found.causal, "reads_whole_vocabulary": True}
    assert replace(written_config, **kept) == found


@pytest.mark.parametrize("changes", [{"fc_bias": True}, {"anchor_input": True}, {"windows": (16, 32)}])
def test_the_speculators_format_refuses_what_it_cannot_say(changes: dict[str, Any], tmp_path: Path, target: Path) -> None:
    with pytest.raises(ValueError, match="the speculators format has no"):
        written(tmp_path, target, "dspark", **changes)


def test_eagle_3_as_its_authors_release_it_is_read(tmp_path: Path, target: Path) -> None:
    """``midlayer``, pickled, with d2t in any order, without an embedding, and with default layers."""
    network, raw = written(tmp_path, target, "eagle3", draft_token_ids=REDUCED, target_layer_ids=(1, 2))
    tensors = load_file(tmp_path / "model.safetensors")
    order = torch.randperm(len(REDUCED))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(REDUCED)[order] - torch.arange(len(REDUCED))
    del tensors["embed_tokens.weight"]
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(renamed, tmp_path / "pytorch_model.bin")
    layer = raw["transformer_layer_config"]
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3]}}
    flat = {**layer, **ids, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(REDUCED)}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert kind_of(tmp_path) == "eagle3"
    same(load_network(tmp_path, target_rows(target), num_target_layers=NUM_LAYERS), network)
    (tmp_path / "config.json").write_text(json.dumps({**flat, "eagle_config": None}))
    assert read_config(tmp_path, 30).target_layer_ids == (1, 14, 26)
    with pytest.raises(ModelUnavailable, match="names no layers of its target"):
        read_config(tmp_path)


def test_dflash_as_its_authors_release_it_is_read(tmp_path: Path, target: Path) -> None:
    network, raw = written(tmp_path, target, "dflash")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(kept, tmp_path / "model.safetensors")
    flat = {
        **raw["transformer_layer_config"],
        "architectures": ["DFlashDraftModel"],
        "block_size": 7,
        "num_target_layers": NUM_LAYERS,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, NUM_LAYERS - 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert kind_of(tmp_path) == "dflash"
    same(load_network(tmp_path, target_rows(target)), network)
    windowed = {**flat, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    assert read_config(tmp_path).attention == ((16, True), (None, False))  # type: ignore[attr-defined]
    flat["dflash_config"] |= {"attention_sink_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with pytest.raises(ModelUnavailable, match="attention_sink_bias is not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("eagle3", {"speculators_model_type": "mtp"}, "comes with it: use kind vllm"),
        ("eagle3", {"speculators_model_type": "medusa"}, "describes no drafter that reads hidden states"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, NUM_LAYERS]}, "before its final norm, which is not kept"),
        ("dspark", {"aux_hidden_state_layer_ids": [NUM_LAYERS], "num_target_layers": None}, "which is not kept"),
        ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ("eagle3", {"draft_vocab_size": 99}, "d2t must map 99 draft tokens"),
        ("dspark", {"markov_head_type": "fir"}, "'fir' is not supported"),
        ("dflash", {"block_size": 0}, "block_size must be a whole number"),
        ("dflash", {"aux_hidden_state_layer_ids": [2, 2]}, "must be different"),
        ("peagle", {"mask_token_id": None}, "mask_token_id must be a whole number"),
        ("dflash", {"transformer_layer_config": None}, "has a value of the wrong kind"),
        ("dspark", {"aux_hidden_state_layer_ids": []}, "has a value of the wrong kind"),
        ("eagle3", {"speculators_config": "none"}, "has a value of the wrong kind"),
        ("eagle3", {"target_hidden_size": -1}, "describes no network that can be made"),
        ("dspark", {"markov_rank": "many"}, "describes no network that can be made"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    kind: HiddenStateKind, changes: dict[str, Any], reason: str, tmp_path: Path, target: Path
) -> None:
    _, raw = written(tmp_path, target, kind)
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ModelUnavailable, match=reason):
        load_network(tmp_path, num_target_layers=NUM_LAYERS)


@pytest.mark.parametrize("d2t", [torch.full((len(REDUCED),), torch.nan), torch.tensor(3), torch.zeros(len(REDUCED)).bool()])
def test_tokens_of_a_head_that_are_no_list_of_integers_are_refused(d2t: torch.Tensor, tmp_path: Path, target: Path) -> None:
    written(tmp_path, target, "eagle3", draft_token_ids=REDUCED)
    save_file(load_file(tmp_path / "model.safetensors") | {"d2t": d2t}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnavailable, match="d2t must be a list of integers"):
        read_config(tmp_path, NUM_LAYERS)


@pytest.mark.parametrize("stored", [b"\x80\x04junk", [1], torch.zeros(3), {"d2t": 3, "fc.weight": 1}])
def test_a_pickle_that_holds_no_tensors_is_refused(stored: Any, tmp_path: Path, target: Path) -> None:
    written(tmp_path, target, "eagle3", draft_token_ids=REDUCED)
    (tmp_path / "model.safetensors").unlink()
    if isinstance(stored, bytes):
        (tmp_path / "pytorch_model.bin").write_bytes(stored)
    else:
        torch.save(stored, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable):
        load_network(tmp_path, target_rows(target))


def test_a_sliding_window_leaves_out_the_context_before_it(target: Path) -> None:
    """The reference: a window of 16 rows reads nothing before them."""
    config = config_of_kind("dflash", target, windows=(16, 16), causal=(True, False))
    network = make_network(config).eval()
    assert isinstance(network, BlockNetwork)
    token_ids, anchors = torch.arange(50), torch.tensor([30])
    features = torch.randn(50, config.feature_size, generator=torch.Generator().manual_seed(0))
    whole = network(features, token_ids, (50,), anchors)
    features[:14] = 3.0
    assert torch.equal(network(features, token_ids, (50,), anchors), whole)
    features[14] = 3.0
    assert not torch.equal(network(features, token_ids, (50,), anchors), whole)


# ---- where the product names the kinds of drafters that read hidden states


ROOT = Path(__file__).parents[2]
PRODUCT = ("cluster", "router", "profiler", "engine", "drafters", "training", "actors", "deploy")
VERIFICATION = {Path("cluster/config/rules.py"), Path("router/drafting/policies.py")}  # the policy `dspark` is no drafter


def strings(text: str) -> list[str]:
    """Of code, without docstrings."""
    tree = ast.parse(text)
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said
    ]


@pytest.mark.parametrize("kind", HIDDEN_STATE_FORMS)
def test_a_kind_is_named_in_at_most_four_files(kind: str) -> None:
    named = {
        path.relative_to(ROOT)
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*.py")
        if kind in (code := path.read_text()) and any(re.search(rf"\b{kind}\b", text) for text in strings(code))
    }
    assert Path("cluster/config/drafters.py") in named
    assert len(named - VERIFICATION) <= 4, sorted(map(str, named))
