"""Which answers are learned from and which are evaluated on: no text is in both."""

from collections.abc import Iterable, Sequence

from drafters.training.corpus import Answer


def hold_out(answers: Sequence[Answer], share: float, at_least: int = 1) -> tuple[list[Answer], list[Answer]]:
    """Answers to learn from and answers to evaluate on, divided by prompt.

    First the prompts that are texts of their own are divided. At least one of two is held out; where a share is less than
    ``at_least``, so many, but not more than a third. Then those composed of them: with a held-out text in it a prompt is not
    learned from. Of these a share like that of the others is evaluated on; the rest, if there is any, is left out.
    """
    keys = _in_order(answer.key for answer in answers if not answer.sources)
    held = set(keys[: max(1, round(share * len(keys)), min(at_least, len(keys) // 3))])
    composed = {answer.key: answer.sources for answer in answers if answer.sources}
    tainted = _in_order(key for key, sources in composed.items() if not held.isdisjoint(sources))
    evaluated = held | set(tainted[: round(len(held) / len(keys) * len(composed))])
    excluded = held.union(tainted)
    return [a for a in answers if a.key not in excluded], [a for a in answers if a.key in evaluated]


def _in_order(keys: Iterable[str]) -> list[str]:
    """Without duplicates. They are fingerprints: their order means nothing."""
    return sorted(set(keys))
