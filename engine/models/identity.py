"""A fingerprint of a model folder that does not read all of its weights."""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from cluster.errors import ModelUnavailable
from engine.models.prepare import weights_file

# What determines tokens and logits besides the weights.
_TEXTS = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_NUM_SPOTS, _SPOT_BYTES = 16, 512  # of a tensor; one of up to twice as many bytes is read whole
_NUM_FILE_SPOTS = 1024


def model_fingerprint(folder: Path) -> str:
    """A digest of settings, templates, and the names, shapes and samples of all tensors, or samples of a GGUF file. Training
    changes almost every number of a tensor, so eight thousand bytes of each suffice; 0.02 s for 135 million parameters.

    Raises ModelUnavailable: no weights, or unreadable ones.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXTS:
        path = folder / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size} ".encode() + path.read_bytes())
    shipped = weights_file(folder)
    for path in sorted(folder.glob("*.safetensors")) if shipped is None else (shipped,):
        try:
            if path != shipped:
                _add_weights(digest, path)
                continue
            num_bytes = path.stat().st_size
            digest.update(f"{num_bytes} ".encode())
            with path.open("rb") as file:
                _add_spots(digest, file, 0, num_bytes, _NUM_FILE_SPOTS)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelUnavailable(f"{path} cannot be read ({error!r}); it may be half-written") from error
    return digest.hexdigest()


def _add_weights(digest: "hashlib.blake2b", path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(header)
        first = file.tell()
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                start, end = (first + offset for offset in tensor["data_offsets"])
                _add_spots(digest, file, start, end)


def _add_spots(digest: "hashlib.blake2b", file: BinaryIO, start: int, end: int, num: int = _NUM_SPOTS) -> None:
    """Samples, spread evenly over a tensor or a file."""
    stride, length = (end - start - _SPOT_BYTES) / (num - 1), _SPOT_BYTES
    if end - start <= num * _SPOT_BYTES * 2:
        num, length = 1, end - start
    for i in range(num):
        file.seek(start + int(i * stride))
        digest.update(file.read(length))
