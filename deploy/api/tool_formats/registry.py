"""The forms by name. Names are vLLM's where it has one, so that ``--tool-call-parser`` keeps its value."""

from collections.abc import Mapping

from deploy.api.chat_template import ChatTemplate
from deploy.api.tool_formats.deepseek import DeepSeekElements, DeepSeekV3, DeepSeekV31
from deploy.api.tool_formats.form import CallForm
from deploy.api.tool_formats.glm import Glm
from deploy.api.tool_formats.granite import Granite
from deploy.api.tool_formats.harmony import Harmony
from deploy.api.tool_formats.hermes import Hermes
from deploy.api.tool_formats.kimi import KimiK2
from deploy.api.tool_formats.llama3 import Llama3Json
from deploy.api.tool_formats.minimax import MiniMaxM2
from deploy.api.tool_formats.mistral import Mistral, Mistral11
from deploy.api.tool_formats.pythonic import Pythonic, PythonicBlock
from deploy.api.tool_formats.qwen_coder import QwenCoder

HERMES, MISTRAL, MISTRAL_11, GLM, QWEN_CODER = Hermes(), Mistral(), Mistral11(), Glm(), QwenCoder()
LLAMA3_JSON, PYTHONIC, HARMONY = Llama3Json(), Pythonic(), Harmony()

CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "granite4": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_11,
    "openai": HARMONY,
    "deepseek_v3": DeepSeekV3(),
    "deepseek_v31": DeepSeekV31(),
    "deepseek_v32": DeepSeekElements("function_calls"),
    "deepseek_v4": DeepSeekElements("tool_calls"),
    "kimi_k2": KimiK2(),
    "glm45": GLM,
    "glm47": GLM,
    "qwen3_coder": QWEN_CODER,
    "qwen3_xml": QWEN_CODER,
    "minimax_m2": MiniMaxM2(),
    "granite": Granite(),
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
    "gemma3": PythonicBlock("```tool_code", "```"),
    "olmo3": PythonicBlock("<function_calls>", "</function_calls>"),
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
