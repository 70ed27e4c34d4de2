"""Prevents control-token injection: only the chat template makes control tokens; a message that spells one stays text.

The template is rendered a second time with masked messages: every character that a control token can begin or end with is
replaced by one that does not occur in the messages. Control tokens found in that rendering are the template's own, and
positions in both renderings agree.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import InvalidField
from deploy.api.chat_template import ChatTemplate, TemplateOptions

Message = Mapping[str, Any]

# Unicode noncharacters, which occur in no text. The first one (U+FDD0) marks the end of a final message.
_MASKS = [chr(code) for code in range(0xFDD1, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's text. ``control_spans``: its control tokens; None: wherever the text spells one."""

    text: str
    control_spans: tuple[tuple[int, int], ...] | None = None


class ControlTokens:
    """The spellings of a tokenizer's control tokens."""

    def __init__(self, spellings: Collection[str]) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._edges = sorted({edge for spelling in spellings for edge in (spelling[0], spelling[-1])})
        self._edge = re.compile(f"[{re.escape(''.join(self._edges))}]" if self._edges else r"(?!)")

    def spans(self, text: str) -> tuple[tuple[int, int], ...]:
        """Start and end of each spelling in ``text``."""
        return tuple(match.span() for match in self._pattern.finditer(text))

    def prompt(self, template: ChatTemplate, messages: Sequence[Message], options: TemplateOptions) -> ChatPrompt:
        """The messages' prompt. Raises InvalidField: the template rejects them, or makes control tokens of their text."""
        text = template.render(messages, options)
        strings: list[str] = []

        def note(string: str) -> str:
            strings.append(string)
            return string

        _rewrite(messages, options, note)
        if not any(self._edge.search(string) for string in strings):
            return ChatPrompt(text)
        hide, show = self._mask([text, *strings])
        masked = template.render(*_rewrite(messages, options, lambda string: string.translate(hide)))
        own = self.spans(masked)
        if masked.translate(show) == text:
            return ChatPrompt(text, None if own == self.spans(text) else own)
        # The template depends on the messages' text: mask complete spellings only.
        names = [masked[begin:end] for begin, end in own]
        if any(self._pattern.search(string) for string in strings):
            hidden = _rewrite(messages, options, lambda string: self._pattern.sub(lambda m: m[0].translate(hide), string))
            masked = template.render(*hidden)
            text, own = masked.translate(show), self.spans(masked)
        else:
            own = self.spans(text)
        if [text[begin:end] for begin, end in own] != names:
            raise InvalidField("messages", len(messages), "the chat template makes control tokens from their text")
        return ChatPrompt(text, None if own == self.spans(text) else own)

    def _mask(self, texts: Sequence[str]) -> tuple[dict[int, str], dict[int, str]]:
        """A translation of each edge character to one that no text contains, and its inverse."""
        used = set().union(*map(set, texts))
        free = [mask for mask in _MASKS if mask not in used]
        if len(free) < len(self._edges):
            raise InvalidField("messages", len(texts), "hold too many of Unicode's noncharacters (U+FDD0 to U+FDEF)")
        pairs = list(zip(self._edges, free, strict=False))
        return {ord(edge): mask for edge, mask in pairs}, {ord(mask): edge for edge, mask in pairs}


def _rewrite(
    messages: Sequence[Message], options: TemplateOptions, change: Callable[[str], str]
) -> tuple[list[Message], TemplateOptions]:
    """Applies ``change`` to every string that a template can print: not to roles and names of variables."""

    def rewritten(value: Any) -> Any:
        match value:
            case str():
                return change(value)
            case Mapping():
                return {rewritten(name): rewritten(item) for name, item in value.items()}
            case list() | tuple():
                return [rewritten(item) for item in value]
        return value

    changed: list[Message] = [
        {name: item if name == "role" else rewritten(item) for name, item in one.items()} for one in messages
    ]
    variables = {name: rewritten(item) for name, item in options.variables.items()}
    return changed, replace(options, variables=variables, tools=rewritten(options.tools))
