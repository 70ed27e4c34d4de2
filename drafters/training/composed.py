"""Prompts put together from other prompts: tasks about a text need a text that makes sense.

A small target that is to write a text *and* what is to be done with it writes neither well: translations of nothing,
questions about passages that are no passages. The prompts at hand, given or self-written, are such texts.
"""

import random
from collections.abc import Callable, Sequence

from drafters.training.corpus import MAX_PROMPT_CHARS, GivenPrompt

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


def compose(prompts: Sequence[GivenPrompt], seed: int) -> list[GivenPrompt]:
    """About as many of each kind as there are prompts in one domain, a function of the arguments."""
    by_domain: dict[str, list[str]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt.prompt)

    def texts(lens: range, *domains: str) -> list[str]:
        return [text for domain in domains for text in by_domain.get(domain, ()) if len(text) in lens]

    num = max((len(of_domain) for of_domain in by_domain.values()), default=0)
    rng = random.Random(f"{seed} composed")
    sentences = texts(_SENTENCE, "math", "how_to", "qa", "chat")
    problems = texts(_SENTENCE, "math")
    questions = texts(_SENTENCE, "qa", "how_to")
    passages = [body for text in texts(_PASSAGE, "summarization", "rag") if len(body := _body(text)) in _PASSAGE]

    def translation() -> str:
        return rng.choice(_TRANSLATIONS).format(rng.choice(_LANGUAGES), rng.choice(sentences))

    def multilingual() -> str:
        return rng.choice(_MULTILINGUAL).format(rng.choice(problems))

    def rag() -> str:
        question = rng.choice(questions)
        some = rng.sample(passages, min(len(passages), rng.randint(1, _MAX_PASSAGES)))
        while len(some) > 1 and sum(map(len, some)) > MAX_PROMPT_CHARS - len(question) - _MARGIN:
            some.pop()
        return rng.choice(_PASSAGES).format("\n\n".join(some), question)

    kinds: list[tuple[str, Callable[[], str], bool]] = [
        ("translation", translation, bool(sentences)),
        ("math_multilingual", multilingual, bool(problems)),
        ("rag", rag, bool(passages and questions)),
    ]
    return [GivenPrompt(domain, make()) for domain, make, is_possible in kinds if is_possible for _ in range(num)]


def _body(text: str) -> str:
    """Without a first paragraph that says what to do with the others."""
    instruction, _, rest = text.partition("\n\n")
    return rest if len(instruction) < len(rest) else text
