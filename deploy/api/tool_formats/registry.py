"""The forms by name. Names are vLLM's where it has one, so that ``--tool-call-parser`` keeps its value."""

from collections.abc import Mapping

from deploy.api.chat_template import ChatTemplate
from deploy.api.tool_formats.element_forms import DEEPSEEK_V4, DEEPSEEK_V32, GLM, MINIMAX_M2, QWEN_CODER
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.harmony import HARMONY
from deploy.api.tool_formats.json_forms import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HERMES,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_11,
)
from deploy.api.tool_formats.pythonic import GEMMA3, OLMO3, PYTHONIC

CALL_FORMS: Mapping[str, CallForm] = {
    **dict.fromkeys(("hermes", "qwen3_json", "granite4"), HERMES),
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA3_JSON),
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_11,
    "openai": HARMONY,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "kimi_k2": KIMI_K2,
    **dict.fromkeys(("glm45", "glm47"), GLM),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), QWEN_CODER),
    "minimax_m2": MINIMAX_M2,
    "granite": GRANITE,
    **dict.fromkeys(("pythonic", "llama4_pythonic"), PYTHONIC),
    "gemma3": GEMMA3,
    "olmo3": OLMO3,
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
