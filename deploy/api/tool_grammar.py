"""Grammars of answers with tool calls, as xgrammar's structural tags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.api.grammar_parts import ANY_TEXT, Format, any_of, marker_of, pattern, sequence, spelled, tag
from deploy.api.messages import Tool
from deploy.api.tool_formats.form import CallForm


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """The grammar of one call's tools, in the model's form of calls.

    Args:
        marker_ids: markers that are special tokens.
        parallel: several calls are possible.
    """

    form: CallForm
    marker_ids: Mapping[str, int]
    tools: Sequence[Tool]
    parallel: bool

    def calls(self, *, strict: bool = True) -> Format:
        """One call or more, and no other text.

        Args:
            strict: all arguments match their schemas, those of tools that are not strict included.
        """
        return sequence(self._calls(strict, ""))

    def text_or_calls(self) -> Format:
        """Any text, with or without calls. Arguments of strict tools match their schemas, others are objects."""
        form, trigger = self.form, marker_of(self.form.trigger, self.marker_ids)
        if not form.trigger:
            text = pattern(form.no_call) if form.no_call else ANY_TEXT
            return any_of([self.calls(strict=False), sequence([*self.spelled(form.text_begin), text])])
        calls, end = self._calls(False, form.trigger), None
        if form.end:  # a tag whose length has no bound must have one
            end = calls.pop()
        tagged = tag(trigger, sequence(calls), "" if end is None else end.get("value", end))
        kind, triggers = "triggered_tags", {"triggers": [trigger]}
        if not isinstance(trigger, str):
            kind, triggers = "token_triggered_tags", {"trigger_tokens": [trigger["token"]]}
        return {"type": kind, **triggers, "tags": [tagged], "stop_after_first": not self.parallel}

    def spelled(self, *pieces: str | Format) -> list[Format]:
        return spelled(pieces, self.marker_ids)

    def _calls(self, strict: bool, begun: str) -> list[Format]:
        """The pieces of calls after ``begun``."""
        form = self.form
        if not form.begin and begun:  # text may stand between calls
            return [any_of(self._tags(strict, begun))]
        several = {
            "type": "tags_with_separator",
            "tags": self._tags(strict, ""),
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not (self.parallel and form.repeats),
        }
        return [*self.spelled(form.begin.removeprefix(begun)), several, *self.spelled(form.end)]

    def _tags(self, strict: bool, begun: str) -> list[Format]:
        """A call of each tool."""
        tags = []
        for tool in self.tools:
            first, *others = self.form.call(tool, strict or tool.function.strict)
            *pieces, last = self.spelled(first.removeprefix(begun) if isinstance(first, str) else first, *others)
            is_end = last["type"] in ("const_string", "token")  # a tag whose length has no bound must have one
            tags.append(
                tag("", sequence(pieces), last.get("value", last)) if is_end else tag("", sequence([*pieces, last]), "")
            )
        return tags
