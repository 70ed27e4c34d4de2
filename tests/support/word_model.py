"""A tiny random target with a token per word, whose output can serve as prompts."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.support.tiny_model import END, write_tiny_model

NUM_WORDS = 254
_SYLLABLES = ("ba", "do", "ki", "lu", "me", "na", "po", "ra", "si", "tu", "ve", "zo", "ga", "he", "wi", "ju")


def write_wordy_model(folder: Path) -> Path:
    """As ``write_tiny_model``, with one token a word. Its prompts and answers end by chance, or at their limit."""
    write_tiny_model(folder)
    words = [_SYLLABLES[i // 16] + _SYLLABLES[i % 16] for i in range(NUM_WORDS)]
    tokens = [*words, ".", "[UNK]", END]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %} .")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
