"""Prompts composed of other prompts, for tasks that need a text: translation, problems in other languages, passages."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from training.corpus import MAX_PROMPT_CHARS, GivenPrompt, fingerprint

_TEXTS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SENTENCE = range(30, 400)  # characters of a question or a text to translate
_PASSAGE = range(300, 2000)
_MAX_PASSAGES = 4
_TEMPLATE_CHARS = 100  # at most, around passages and question

_Source = tuple[str, str]  # a text, and the fingerprint of its prompt


def compose(prompts: Sequence[GivenPrompt], seed: int, num_each: int) -> list[GivenPrompt]:
    """At most ``num_each`` prompts of each kind, and at most as many as there are source texts. Deterministic."""

    def sources(lens: range, *domains: str) -> list[_Source]:
        return [
            (p.prompt, fingerprint(p.prompt))
            for domain in domains
            for p in prompts
            if p.domain == domain and len(p.prompt) in lens
        ]

    rng = random.Random(f"{seed} composed")
    sentences = sources(_SENTENCE, "math", "how_to", "qa", "chat")
    problems = sources(_SENTENCE, "math")
    questions = sources(_SENTENCE, "qa", "how_to")
    bodies = [(_without_instruction(text), key) for text, key in sources(_PASSAGE, "summarization", "rag")]
    passages = [body for body in bodies if len(body[0]) in _PASSAGE]

    def translation() -> GivenPrompt:
        template, language, (text, key) = (
            rng.choice(_TEXTS["translation"]),
            rng.choice(_TEXTS["languages"]),
            rng.choice(sentences),
        )
        return GivenPrompt("translation", template.format(language, text), (key,))

    def multilingual() -> GivenPrompt:
        template, (text, key) = rng.choice(_TEXTS["math_multilingual"]), rng.choice(problems)
        return GivenPrompt("math_multilingual", template.format(text), (key,))

    def rag() -> GivenPrompt:
        question, question_key = rng.choice(questions)
        chosen = rng.sample(passages, min(len(passages), rng.randint(1, _MAX_PASSAGES)))
        while len(chosen) > 1 and sum(len(text) for text, _ in chosen) > MAX_PROMPT_CHARS - len(question) - _TEMPLATE_CHARS:
            chosen.pop()
        text = rng.choice(_TEXTS["rag"]).format("\n\n".join(text for text, _ in chosen), question)
        return GivenPrompt("rag", text, (*(key for _, key in chosen), question_key))

    kinds: list[tuple[Callable[[], GivenPrompt], int]] = [
        (translation, len(sentences)),
        (multilingual, len(problems)),
        (rag, min(len(passages), len(questions))),
    ]
    return [make() for make, num_texts in kinds for _ in range(min(num_each, num_texts))]


def _without_instruction(text: str) -> str:
    """Drops a first paragraph that is shorter than the rest."""
    first, _, rest = text.partition("\n\n")
    return rest if len(first) < len(rest) else text
