"""gpt-oss: an answer is messages on channels. ``analysis`` is reasoning, ``final`` is content, and a message to
``functions.name`` is a call. Messages without a recipient on ``commentary`` are content, too."""

import re
from collections.abc import Sequence

from deploy.api.answer_parts import Arguments, CallStart, Opening, Part, Reasoning, Text, merged, num_begun
from deploy.api.messages import Tool
from deploy.api.tool_formats.json_call import JsonDepth

CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
_ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)  # of a message; the last two begin the next one
_HEADS = (START, CHANNEL, "<|constrain|>", "to=")
_MAX_HEAD_LEN = 512
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,256})", re.ASCII)
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis")


class HarmonyParser:
    """``deploy.api.answer_parts.AnswerParser`` for harmony's messages.

    Args:
        tools: that may be called. Messages to others are content.
        opening: where the prompt ends: before a message, or amid one.
    """

    def __init__(self, tools: Sequence[Tool], opening: Opening = "either") -> None:
        self._names = {tool.function.name for tool in tools}
        self._state = {"either": "head", "reasoning": "reasoning", "answer": "text"}[opening]
        self._held = ""
        self._num_calls = 0
        self._json = JsonDepth()  # of this message
        self._is_json: bool | None = None  # it looks like JSON; None: it has not begun
        self._has_arguments = False  # of the last call
        self._ended: set[str] = set()  # states of which messages ended
        self._is_new = False  # nothing of this message was passed on

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended amid the arguments of a call."""
        return self._state == "call" and not (self._json.is_complete or (self._has_arguments and not self._is_json))

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and (self._read_head() if self._state == "head" else self._read_body(parts)):
            pass
        return merged(parts)

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "head":
            return [] if held.lstrip().startswith(_HEADS) else [Text(held)] if held.strip() else []
        parts = self._passed_on(held)
        if self._state == "call" and not self._has_arguments:
            self._has_arguments = True
            parts.append(Arguments(self._num_calls - 1, "{}"))
        return parts

    def _read_head(self) -> bool:
        rest = self._held.lstrip()
        found = rest.find(MESSAGE)
        if rest.startswith(_HEADS) and 0 <= found <= _MAX_HEAD_LEN:
            self._held = rest[found + len(MESSAGE) :]
            self._begin(rest[:found])
            return True
        is_head = rest.startswith(_HEADS) and len(rest) <= _MAX_HEAD_LEN + len(MESSAGE)
        if is_head or any(head.startswith(rest) for head in _HEADS):
            return False
        self._begin("")
        return True

    def _begin(self, head: str) -> None:
        self._is_new, self._json, self._is_json = True, JsonDepth(), None
        recipient = _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._names:
            self._state, self._has_arguments = "call", False
            self._called = recipient[1]
        else:
            self._state = "reasoning" if _ANALYSIS.search(head) else "text"

    def _read_body(self, parts: list[Part]) -> bool:
        if self._state == "call" and self._is_new:
            parts.append(CallStart(self._num_calls, self._called))
            self._num_calls += 1
            self._is_new = False
        found = _END.search(self._held)
        if found is None:
            num_taken = len(self._held) - max(num_begun(self._held, end) for end in _ENDS)
            parts += self._passed_on(self._held[:num_taken])
            self._held = self._held[num_taken:]
            return False
        parts += self._passed_on(self._held[: found.start()])
        if self._json.in_string:  # the marker is text in an argument, or in an answer of JSON
            parts += self._passed_on(found[0])
            self._held = self._held[found.end() :]
            return bool(self._held)
        if self._state == "call" and not self._has_arguments:
            parts.append(Arguments(self._num_calls - 1, "{}"))
        self._ended.add(self._state)
        is_head = found[0] in (START, CHANNEL)
        self._held, self._state = self._held[found.start() if is_head else found.end() :], "head"
        return True

    def _passed_on(self, text: str) -> list[Part]:
        """Text of the message. Messages of one kind are apart by a line break."""
        if not text:
            return []
        if self._is_json is None and self._state != "reasoning" and text.strip():
            self._is_json = text.lstrip()[0] in '{["'
        if self._is_json:
            self._json.feed(text)
        if self._state == "call":
            self._has_arguments |= not text.isspace()
            return [Arguments(self._num_calls - 1, text)]
        separator = "\n" if self._is_new and self._state in self._ended else ""
        self._is_new = False
        return [Reasoning(separator + text) if self._state == "reasoning" else Text(separator + text)]
