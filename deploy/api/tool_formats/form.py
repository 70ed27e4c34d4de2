"""What is known of one family's form of tool calls: its markers, its parser, and the parts of its grammar."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.api.answer_parts import PartParser
from deploy.api.grammar_parts import Format
from deploy.api.messages import Tool


@dataclass(frozen=True, kw_only=True)
class CallForm(ABC):
    """A grammar of calls is ``begin``, calls with ``separator`` between them, ``end``.

    Strings among the pieces of a grammar are literal text; markers in them that are special tokens become tokens.
    """

    markers: tuple[str, ...] = ()  # spellings that may be special tokens
    inner_markers: tuple[str, ...] = ()  # those that a grammar writes as text all the same
    trigger: str = ""  # text from which on an answer is calls; "": text never becomes a call
    begin: str = ""  # of all calls
    separator: str = ""
    end: str = ""
    no_call: str = ""  # without a trigger: a pattern of the answers that are text
    repeats: bool = True  # several calls in one answer are possible
    short_ids: bool = False  # of calls: nine letters and digits
    text_begin: str = ""  # before content

    @abstractmethod
    def parser(self, tools: Sequence[Tool]) -> PartParser: ...

    @abstractmethod
    def call(self, tool: Tool, strict: bool | None) -> Sequence[str | Format]:
        """The pieces of one call.

        Args:
            strict: the arguments match the tool's schema; otherwise they are any object.

        Raises:
            ApiError: 400, the schema cannot be enforced in this form.
        """
