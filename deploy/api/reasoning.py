"""Markers of reasoning in front of an answer, by the name of its parser, which is vLLM's where it has one."""

from collections.abc import Mapping

from deploy.api.tool_formats.harmony import CHANNEL, END, MESSAGE

THINK = ("<think>", "</think>")
_OF_THINK = ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "glm47", "kimi_k2", "minimax_m2", "olmo3")
REASONING: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_OF_THINK, THINK),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "openai_gptoss": (f"{CHANNEL}analysis{MESSAGE}", END),
}


def reasoning_in(source: str) -> str:
    """The name of the reasoning in a chat template; "none" without any."""
    if CHANNEL in source and MESSAGE in source:
        return "openai_gptoss"
    return next((name for name, (_, end) in REASONING.items() if end in source and end != END), "none")
