"""The vocabulary of a tokenizer, and its fingerprint. Reads tokenizer.json itself: no torch, no tokenizers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelUnavailable

FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The meaning of token ids. Normalization, splitting and templates may differ, as they only select ids."""

    tokens: dict[int, str]  # ids need not be dense
    merges: tuple[str, ...]  # of byte pair encoding, in their order
    special: dict[int, str]  # tokens that stand for no text

    def fingerprint(self) -> str:
        """sha256 over tokens, merges and special tokens. Equal fingerprints: token ids are interchangeable."""
        content = [sorted(self.tokens.items()), self.merges, sorted(self.special.items())]
        return hashlib.sha256(json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """The content of tokenizer.json. Raises ModelUnavailable, naming the file, if it is missing or unreadable."""
    path = folder / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnavailable(f"{path} is missing: save the model's tokenizer in the fast format into its folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelUnavailable(f"{path} is not a readable tokenizer ({error}); it may be half-written") from error
    return content


def vocabulary_of(content: Mapping[str, Any], folder: Path) -> Vocabulary:
    """Raises ModelUnavailable, naming the file: the content of tokenizer.json describes no vocabulary."""
    try:
        model, added = content["model"], content.get("added_tokens") or ()
        vocab = model["vocab"]
        # Unigram models list (piece, score) in the order of their ids, the others map pieces to ids.
        pieces = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        tokens = {int(token_id): str(piece) for piece, token_id in pieces}
        tokens |= {int(token["id"]): str(token["content"]) for token in added}
        merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ())
        special = {int(token["id"]): str(token["content"]) for token in added if token.get("special")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelUnavailable(
            f"{folder / FILE} does not describe a vocabulary ({error!r}); it may be half-written"
        ) from error
    return Vocabulary(tokens, merges, special)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Raises ModelUnavailable, naming the file: no tokenizer.json, or an unreadable one."""
    return vocabulary_of(read_tokenizer(folder), folder)


def fingerprint(folder: Path) -> str:
    """``Vocabulary.fingerprint`` of a folder. Raises as ``read_vocabulary``."""
    return read_vocabulary(folder).fingerprint()
