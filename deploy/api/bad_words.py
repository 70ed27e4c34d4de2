"""The tokens of ``bad_words``, which vLLM's clients send as texts."""

from collections.abc import Sequence

from deploy.api.errors import bad_request
from deploy.api.tokenizer import Tokenizer


def spellings(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the beginning of a text and after a space. Other tokens may spell it, too, as in vLLM.

    Raises ApiError: 400, a word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        spelled = tokenizer.ids_of(word.lstrip())
        if not spelled:
            raise bad_request(f"bad_words.{i}", "must hold more than spaces")
        found |= dict.fromkeys((spelled, tokenizer.ids_of(f" {word.lstrip()}")))
    return tuple(found)
