"""A model either runs exactly or is refused in one line that says why."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ModelUnavailable
from engine.factory import load_model
from engine.models.config import inverse_frequencies, load_config, parse_config
from engine.models.weights import INDEX, SINGLE, open_weights
from tests.support.families import FAMILIES, write_family
from training.work_folder import model_fingerprint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def test_reads_what_older_and_newer_files_say() -> None:
    old = parse_config(LLAMA | {"rope_theta": 5e5, "torch_dtype": "float16", "eos_token_id": [1, 2]})
    new = parse_config(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "eos_token_id": [1, 2]})
    assert old == new
    assert old.eos_token_ids == (1, 2)
    assert (old.num_kv_heads, old.head_dim, old.rope.theta) == (4, 16, 5e5)


def test_end_of_sequence_comes_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load_config(tmp_path).eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_what_would_run_wrongly_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ModelUnavailable) as refusal:
        load_config(tmp_path)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_missing_and_broken_files_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"not a folder.*ORG/MODEL of the hub"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelUnavailable, match=r"config\.json is missing"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ModelUnavailable, match="half-written"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelUnavailable, match="'num_attention_heads'"):
        load_config(tmp_path)


def test_a_sliding_window_ends_the_context() -> None:
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 256}
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 256}
    assert parse_config(mistral).max_len == 256
    assert parse_config(qwen | {"use_sliding_window": False}).max_len == 1024
    assert parse_config(qwen | {"use_sliding_window": True}).max_len == 256


@pytest.mark.parametrize("name", ["llama", "llama-linear-rope", "llama-llama3-rope"])
def test_rotary_frequencies_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_family(name, tmp_path).model.rotary_emb.inv_freq
    ours = torch.tensor(inverse_frequencies(load_config(tmp_path)))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_family(name, tmp_path, max_shard_size="100KB").model.layers[1]
    assert (tmp_path / INDEX).exists()  # so shards are read, too
    config = load_config(tmp_path)
    with open_weights(tmp_path, config, torch.float32) as weights:
        layer = list(weights.layers())[1]
        attention = theirs.self_attn
        q, k, v = layer.qkv.weight.split([config.q_size, config.kv_size, config.kv_size])
        torch.testing.assert_close(
            (q, k, v), tuple(p.weight.data for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        )
        torch.testing.assert_close(layer.gate_up.weight.chunk(2)[1], theirs.mlp.up_proj.weight.data)
        assert (layer.qkv.bias is not None) == (attention.q_proj.bias is not None)
        assert (layer.out.bias is not None) == (attention.o_proj.bias is not None)
        assert (layer.down.bias is not None) == (theirs.mlp.down_proj.bias is not None)
        assert torch.equal(weights.head(), weights.embedding()) == config.tied_embeddings


def test_broken_weights_are_one_clear_line(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelUnavailable, match="not a whole safetensors file"):
        load_model(tmp_path, "float32")
    weights.unlink()
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors file"):
        load_model(tmp_path, "float32")
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelUnavailable, match=r"gate_proj\.weight has shape \(160, 96\), expected \(64, 96\)"):
        load_model(tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelUnavailable, match=r"no tensor model\.layers\.3\."):
        load_model(tmp_path, "float32")


def test_a_truncated_model_has_the_first_layers() -> None:
    config = parse_config(LLAMA)
    assert config.truncated(1) == replace(config, num_layers=1)
    with pytest.raises(ModelUnavailable, match="between 1 and the model's 2, got 3"):
        config.truncated(3)


# ---- the fingerprint of a model: equal for copies, another after training


@pytest.fixture
def copy(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_folder, tmp_path / "copy")


def test_a_copy_is_the_same_model(tiny_model_folder: Path, copy: Path) -> None:
    assert model_fingerprint(copy) == model_fingerprint(tiny_model_folder)


def test_a_changed_tensor_makes_another_model(copy: Path) -> None:
    """Each of them by itself, small and large, changed nearly everywhere as training does."""
    tensors, before = load_file(copy / SINGLE), model_fingerprint(copy)
    tensors["large"] = torch.randn(300, 300)
    save_file(tensors, copy / SINGLE)
    seen = {before, model_fingerprint(copy)}
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor * 1.02}, copy / SINGLE)
        seen.add(model_fingerprint(copy))
    assert len(seen) == len(tensors) + 2


def test_settings_and_templates_are_part_of_a_model(copy: Path) -> None:
    seen = {model_fingerprint(copy)}
    for name in ("config.json", "chat_template.jinja"):
        (copy / name).write_text('{"rope_theta": 5}')
        seen.add(model_fingerprint(copy))
    assert len(seen) == 3


def test_half_a_file_and_none_are_refused(copy: Path) -> None:
    path = copy / SINGLE
    for content in (path.read_bytes()[:100], b"\xff" * 100, (2**40).to_bytes(8, "little") + b"{}"):  # lengths of a header
        path.write_bytes(content)
        with pytest.raises(ModelUnavailable, match="half-written"):
            model_fingerprint(copy)
    path.unlink()
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors"):
        model_fingerprint(copy)
