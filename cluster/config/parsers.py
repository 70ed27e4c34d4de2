"""Names of the forms in which models write tool calls and reasoning."""

from typing import Literal

# `deploy.api.tool_formats.forms` and `deploy.api.tools` hold them; most are names of vLLM's parsers.
ToolCallParser = Literal[
    "none",
    "hermes",
    "qwen3_json",
    "granite4",
    "llama3_json",
    "llama4_json",
    "mistral",
    "mistral_v11",
    "openai",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "glm45",
    "glm47",
    "qwen3_coder",
    "qwen3_xml",
    "minimax_m2",
    "granite",
    "pythonic",
    "llama4_pythonic",
    "gemma3",
    "olmo3",
]
ReasoningParser = Literal[
    "none",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax_m2",
    "olmo3",
    "mistral",
    "seed_oss",
    "openai_gptoss",
]
