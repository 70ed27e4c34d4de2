"""Forms in which model families write tool calls, by name. Names are vLLM's where it has one, so that ``--tool-call-parser``
keeps its value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deploy.api.answer_parts import PartParser
from deploy.api.chat_template import ChatTemplate
from deploy.api.messages import Tool
from deploy.api.structured import Format, arguments, pattern
from deploy.api.tool_formats import Head, LeadingScanner, NewCall, Scanner
from deploy.api.tool_formats.element_call import ElementCall, ElementGrammar, Elements
from deploy.api.tool_formats.harmony import CHANNEL, END, MESSAGE, START, HarmonyParser
from deploy.api.tool_formats.json_call import HeadedCall, ObjectCall
from deploy.api.tool_formats.python_call import PythonCall, python_arguments


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """One family's form. A grammar of calls is ``begin``, calls with ``separator`` between them, ``end``;
    markers in them that are special tokens become tokens.

    Args:
        call: one call, with {name} or {id}, which names the function and counts calls, and {arguments}.
        new_parser: of the calls of these tools.
        arguments: their grammar. True: they match the tool's schema; else they are any object.
    """

    call: str
    new_parser: Callable[["CallForm", Sequence[Tool]], PartParser]
    arguments: Callable[[Tool, bool], Format] = arguments
    elements: Elements | None = None  # of arguments that are elements
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

    @property
    def head(self) -> str:
        return self.call.partition("{arguments}")[0]

    @property
    def tail(self) -> str:
        return self.call.partition("{arguments}")[2]

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return self.new_parser(self, tools)

    def pieces(self, tool: Tool, *, strict: bool) -> Sequence[str | Format]:
        """Of one call. Raises ApiError: 400, the schema cannot be enforced in this form."""
        name = tool.function.name
        first, *others = self.head.replace("{name}", name).split("{id}")
        # The template repeats the id with the result.
        counted = [piece for other in others for piece in (f"functions.{name}:", pattern("[0-9]{1,3}"), other)]
        return first, *counted, self.arguments(tool, strict), self.tail


def _names(tools: Sequence[Tool]) -> list[str]:
    return [tool.function.name for tool in tools]


def _call_begin(template: str) -> str:
    return template.partition("{")[0]


# ---- arguments as JSON

_OBJECT = '{"name": "{name}", "arguments": {arguments}}'


def _object_parser(form: CallForm, _: Sequence[Tool]) -> PartParser:
    """A call of an unknown tool is a call: the caller sees which."""
    return Scanner(form.trigger, ObjectCall, end=form.tail[1:].strip(), skipped="[],")


def _llama_parser(_: CallForm, tools: Sequence[Tool]) -> PartParser:
    """The whole answer is calls. One that begins with JSON may be none: only known tools, with parameters, are called."""
    new_call = partial(ObjectCall, names=_names(tools) or None, needs_arguments=True)
    return LeadingScanner("<|python_tag|>", new_call, "{", "{", "", skipped=";", keeps_first=True)


_MISTRAL_HEADS = [Head.of(head) for head in ("{name}", "{name}[ARGS]", "{name}[CALL_ID]{other_id}[ARGS]")]


def _mistral_parser(form: CallForm, _: Sequence[Tool]) -> PartParser:
    """Of both of its forms."""
    return Scanner(form.trigger, ObjectCall, skipped="[],", other_call=partial(HeadedCall, heads=_MISTRAL_HEADS))


def _headed_parser(form: CallForm, _: Sequence[Tool]) -> PartParser:
    new_call = partial(HeadedCall, heads=[Head.of(form.head)], tail=form.tail.strip(), ids=set[str]())
    return Scanner(form.trigger, new_call, _call_begin(form.head), form.end)


def _section(calls: tuple[str, str], call: str, *inner: str, separator: str = "") -> CallForm:
    """Calls between two markers. ``inner``: markers of a call."""
    begin, end = calls
    markers = (*calls, *inner)
    return CallForm(
        call=call, new_parser=_headed_parser, markers=markers, trigger=begin, begin=begin, end=end, separator=separator
    )


HERMES = CallForm(
    call=f"<tool_call>\n{_OBJECT}\n</tool_call>",
    new_parser=_object_parser,
    markers=("<tool_call>", "</tool_call>"),
    trigger="<tool_call>",
    separator="\n",
)
_GRANITE = CallForm(
    call=_OBJECT,
    new_parser=_object_parser,
    markers=("<|tool_call|>",),
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    separator=", ",
    end="]",
)
_LLAMA3_JSON = CallForm(
    call=_OBJECT.replace("arguments", "parameters", 1),
    new_parser=_llama_parser,
    markers=("<|python_tag|>",),
    separator="; ",
    no_call=r"\s*([^{<\s][\s\S]*|<([^|][\s\S]*)?)?",  # begins neither with a brace nor with <|python_tag|>
)
# From version 11 of the tokenizer on.
_MISTRAL_11 = CallForm(
    call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    new_parser=_mistral_parser,
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    trigger="[TOOL_CALLS]",
    short_ids=True,
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL, _SEPARATOR, _CALL_END = _IN_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
# A call ends the answer by the token <|call|>, which is an end of sequence.
HARMONY = CallForm(
    call=f"{CHANNEL}commentary to=functions.{{name}} <|constrain|>json{MESSAGE}{{arguments}}",
    new_parser=lambda _, tools: HarmonyParser(tools),
    markers=(CHANNEL, MESSAGE, END, START, "<|call|>", "<|return|>", "<|constrain|>"),
    repeats=False,
    text_begin=f"{CHANNEL}final{MESSAGE}",
)


# ---- an element for each argument


def _elements(
    call: str,
    parameter: str,
    value_end: str,
    *,
    last: str = "",
    on_lines: bool = False,
    followed_by: tuple[str, ...] = (),
    **form: Any,
) -> CallForm:
    """``last``: the end of what is read from the trigger on. ``followed_by``: as in `Head.of`."""
    head, _, tail = call.partition("{arguments}")
    trigger = form["trigger"]
    head = head.removeprefix(trigger).lstrip()
    elements = Elements(
        head=Head.of(head, before=followed_by),
        parameter=Head.of(parameter),
        value_end=value_end,
        end=tail.removesuffix(last).strip(),
        on_lines=on_lines,
    )

    def new_parser(_: CallForm, tools: Sequence[Tool]) -> PartParser:
        new_call: NewCall = partial(ElementCall, elements=elements, tools=tools)
        return Scanner(trigger, new_call, _call_begin(head), last, is_section=bool(last))

    def grammar(tool: Tool, strict: bool) -> Format:
        return ElementGrammar(elements, tool, strict=strict).arguments()

    return CallForm(call=call, new_parser=new_parser, arguments=grammar, elements=elements, separator="\n", **form)


def _invocations(section: str, mark: str = "", is_string: str = "", markers: tuple[str, ...] = ()) -> CallForm:
    """``<invoke name="..."><parameter name="city">Paris</parameter></invoke>`` within the element ``section``.

    Args:
        mark: before the names of the elements within.
        is_string: the attribute of a parameter that says whether it is a string.
    """
    return _elements(
        f'<{mark}invoke name="{{name}}">\n{{arguments}}</{mark}invoke>',
        f'<{mark}parameter name="{{key}}"{is_string}>',
        f"</{mark}parameter>",
        last=f"</{section}>",
        markers=markers,
        inner_markers=(mark,) if mark else (),
        trigger=f"<{section}>",
        begin=f"<{section}>\n",
        end=f"\n</{section}>",
    )


_GLM = _elements(
    "<tool_call>{name}\n{arguments}</tool_call>",
    "<arg_key>{key}</arg_key>\n<arg_value>",
    "</arg_value>",
    followed_by=("<arg_key>", "</tool_call>"),  # which decides whether a word after the marker is a name
    markers=("<tool_call>", "</tool_call>"),
    inner_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    trigger="<tool_call>",
)
_QWEN_CODER = _elements(
    "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
    "<parameter={key}>",
    "</parameter>",
    last="</tool_call>",
    on_lines=True,
    markers=("<tool_call>", "</tool_call>"),
    trigger="<tool_call>",
)
_DSML = "｜DSML｜"


# ---- Python


def _python_parser(form: CallForm, tools: Sequence[Tool]) -> PartParser:
    """The whole answer is a list of calls; with a trigger, calls stand on lines between two markers."""
    new_call: NewCall = partial(PythonCall, names=_names(tools))
    if form.trigger:
        return Scanner(form.trigger, new_call, "", form.end.strip(), skipped="[],;")
    return LeadingScanner("<|python_start|>", new_call, "[", "", "]", skipped=",", keeps_first=False)


_PYTHONIC = CallForm(
    call="{name}({arguments})",
    new_parser=_python_parser,
    arguments=python_arguments,
    markers=("<|python_start|>", "<|python_end|>"),
    begin="[",
    separator=", ",
    end="]",
    no_call=r"\s*([^\[<\s][\s\S]*|<([^|][\s\S]*)?)?",  # begins neither with a bracket nor with <|python_start|>
)


def _python_block(begin: str, end: str) -> CallForm:
    form = replace(_PYTHONIC, markers=(begin, end), trigger=begin, no_call="", separator="\n")
    return replace(form, begin=f"{begin}\n", end=f"\n{end}")


# ---- by name

CALL_FORMS: Mapping[str, CallForm] = {
    **dict.fromkeys(("hermes", "qwen3_json", "granite4"), HERMES),
    **dict.fromkeys(("llama3_json", "llama4_json"), _LLAMA3_JSON),
    "mistral": replace(_MISTRAL_11, call=_OBJECT, begin="[TOOL_CALLS] [", separator=", ", end="]"),
    "mistral_v11": _MISTRAL_11,
    "openai": HARMONY,
    "deepseek_v3": _section(
        _DEEPSEEK,
        f"{_CALL}function{_SEPARATOR}{{name}}\n```json\n{{arguments}}\n```{_CALL_END}",
        *_IN_CALL,
        separator="\n",
    ),
    "deepseek_v31": _section(_DEEPSEEK, f"{_CALL}{{name}}{_SEPARATOR}{{arguments}}{_CALL_END}", *_IN_CALL),
    "deepseek_v32": _invocations(f"{_DSML}function_calls", _DSML, ' string="{is_string}"'),
    "deepseek_v4": _invocations(f"{_DSML}tool_calls", _DSML, ' string="{is_string}"'),
    "kimi_k2": _section(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        f"{_KIMI[0]}{{id}}{_KIMI[1]}{{arguments}}{_KIMI[2]}",
        *_KIMI,
    ),
    **dict.fromkeys(("glm45", "glm47"), _GLM),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _QWEN_CODER),
    "minimax_m2": _invocations("minimax:tool_call", markers=("<minimax:tool_call>", "</minimax:tool_call>")),
    "granite": _GRANITE,
    **dict.fromkeys(("pythonic", "llama4_pythonic"), _PYTHONIC),
    "gemma3": _python_block("```tool_code", "```"),
    "olmo3": _python_block("<function_calls>", "</function_calls>"),
}

# Texts in chat templates by which a form is recognised, all of which must occur; the first form that fits is taken.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("glm45", ("<arg_key>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("gemma3", ("```tool_code",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ',)),
)


def name_in(template: ChatTemplate | None) -> str | None:
    """The name of the form that a template teaches. One that knows no tools is given `tool_prompts`."""
    if template is None:
        return None
    if not template.knows_tools:
        return "hermes"
    return next((name for name, signs in _SIGNS if all(sign in template.source for sign in signs)), None)


def form_of(name: str, template: ChatTemplate | None) -> CallForm:
    """The form of a configured name. "mistral" is the version that the template teaches."""
    is_newer = name == "mistral" and template is not None and "[ARGS]" in template.source
    return CALL_FORMS["mistral_v11" if is_newer else name]
