"""The vocabulary of a tokenizer, its fingerprint, and the bytes that its tokens stand for. Reads tokenizer.json itself: no
torch, no tokenizers."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
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


def read_token_bytes(folder: Path, vocab_size: int) -> tuple[bytes, ...]:
    """The bytes of each token id of a Hugging Face folder; empty for special tokens and padding.

    Raises:
        ModelUnavailable: no tokenizer.json, an unreadable one, or one that spells bytes in an unknown way.
    """
    content = read_tokenizer(folder)
    vocabulary, spell = vocabulary_of(content, folder), spelling_of(content.get("decoder"))
    spelled = {i: spell(token) for i, token in vocabulary.tokens.items() if i not in vocabulary.special}
    return tuple(spelled.get(token_id, b"") for token_id in range(vocab_size))


def spelling_of(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """How a vocabulary spells bytes: as stand-in characters (byte-level BPE) or ``<0x0A>`` tokens (SentencePiece).

    Args:
        decoder: that of tokenizer.json.

    Raises:
        ModelUnavailable: neither.
    """
    if decoder is None:
        raise ModelUnavailable("the tokenizer has no decoder; byte-level and SentencePiece tokenizers are supported")
    steps = [step["type"] for step in decoder.get("decoders", [decoder])]
    if "ByteLevel" in steps:
        return _byte_level
    if "ByteFallback" in steps or "Metaspace" in steps:
        return _sentence_piece
    raise ModelUnavailable(
        f"the tokenizer decodes by {' + '.join(steps)}; byte-level and SentencePiece tokenizers are supported"
    )


def _byte_alphabet() -> dict[str, int]:
    """The stand-ins of byte-level BPE: printable bytes stand for themselves, others are U+0100 onwards."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in prints)
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token, written literally
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
