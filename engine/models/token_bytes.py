"""The bytes that a tokenizer's tokens stand for. No torch, no tokenizers."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.errors import ModelUnavailable
from engine.models.tokenizer import read_tokenizer, vocabulary_of


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
