"""Prompts put together from other prompts: tasks about a text need a text that makes sense.

A small target that is to write a text *and* what is to be done with it writes neither well: translations of nothing,
questions about passages that are no passages. The prompts at hand, given or self-written, are such texts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafters.training.corpus import MAX_PROMPT_CHARS, GivenPrompt, fingerprint

_LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Russian", "Chinese", "Japanese")
_TRANSLATIONS = (
    "Translate this text into {}.\n\n{}",
    "Translate the following from English to {}:\n\n{}",
    "How do you say this in {}?\n\n{}",
    "{} translation, please:\n\n{}",
)
_MULTILINGUAL = (
    "Löse die folgende Aufgabe und antworte auf Deutsch.\n\n{}",
    "Résous le problème suivant et réponds en français.\n\n{}",
    "Resuelve el siguiente problema y responde en español.\n\n{}",
    "Реши задачу и ответь по-русски.\n\n{}",
    "请用中文解答下面的问题。\n\n{}",
    "次の問題を日本語で解いてください。\n\n{}",
)
_PASSAGES = (
    "{}\n\nQuestion: {}",
    "Answer the question with the help of the passages.\n\n{}\n\n{}",
    "Context:\n{}\n\n{}",
    "{}\n\nUse the text above to answer: {}",
)
_SENTENCE = range(30, 400)  # characters of what is translated, and of questions
_PASSAGE = range(300, 2000)
_MAX_PASSAGES = 4
_MARGIN = 100  # characters for the frame of passages


@dataclass(frozen=True, slots=True)
class _Source:
    """A text, and the fingerprint of the prompt that it was taken from."""

    text: str
    key: str


def compose(prompts: Sequence[GivenPrompt], seed: int, num_each: int) -> list[GivenPrompt]:
    """At most ``num_each`` of each kind, and no more than there are texts for it: a text in many tasks teaches little. A
    function of the arguments."""
    by_domain: dict[str, list[_Source]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(_Source(prompt.prompt, fingerprint(prompt.prompt)))

    def sources(lens: range, *domains: str) -> list[_Source]:
        return [source for domain in domains for source in by_domain.get(domain, ()) if len(source.text) in lens]

    rng = random.Random(f"{seed} composed")
    sentences = sources(_SENTENCE, "math", "how_to", "qa", "chat")
    problems = sources(_SENTENCE, "math")
    questions = sources(_SENTENCE, "qa", "how_to")
    bodies = [_Source(_body(source.text), source.key) for source in sources(_PASSAGE, "summarization", "rag")]
    passages = [body for body in bodies if len(body.text) in _PASSAGE]

    def translation() -> GivenPrompt:
        frame, language, sentence = rng.choice(_TRANSLATIONS), rng.choice(_LANGUAGES), rng.choice(sentences)
        return GivenPrompt("translation", frame.format(language, sentence.text), (sentence.key,))

    def multilingual() -> GivenPrompt:
        frame, problem = rng.choice(_MULTILINGUAL), rng.choice(problems)
        return GivenPrompt("math_multilingual", frame.format(problem.text), (problem.key,))

    def rag() -> GivenPrompt:
        question = rng.choice(questions)
        some = rng.sample(passages, min(len(passages), rng.randint(1, _MAX_PASSAGES)))
        while len(some) > 1 and sum(len(one.text) for one in some) > MAX_PROMPT_CHARS - len(question.text) - _MARGIN:
            some.pop()
        text = rng.choice(_PASSAGES).format("\n\n".join(one.text for one in some), question.text)
        return GivenPrompt("rag", text, (*(one.key for one in some), question.key))

    kinds: list[tuple[Callable[[], GivenPrompt], int]] = [
        (translation, len(sentences)),
        (multilingual, len(problems)),
        (rag, min(len(passages), len(questions))),
    ]
    return [make() for make, num_texts in kinds for _ in range(min(num_each, num_texts))]


def _body(text: str) -> str:
    """Without a first paragraph that says what to do with the others."""
    instruction, _, rest = text.partition("\n\n")
    return rest if len(instruction) < len(rest) else text
