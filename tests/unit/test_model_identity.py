"""The fingerprint of a model: equal for copies, another after training."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ModelUnavailable
from engine.models.identity import model_fingerprint
from engine.models.weights import SINGLE


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
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelUnavailable, match="half-written"):
        model_fingerprint(copy)
    path.unlink()
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors"):
        model_fingerprint(copy)
