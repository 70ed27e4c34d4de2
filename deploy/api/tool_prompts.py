"""Tools for models whose chat template does not know them, in the form that Hermes and SmolLM2 were trained on."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """You may call functions to assist with the user query. The functions are described in JSON:

<tools>
{tools}
</tools>

For each function call, answer with a JSON object with the function's name and arguments within <tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def without_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages that any template can render: tools in the system message, calls and their results as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        system = plain.pop(0)
        instructions = f"{system['content']}\n\n{instructions}"
    return [{"role": "system", "content": instructions}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return kept | {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(_call(call["function"]), ensure_ascii=False) for call in message.get("tool_calls", ())]
    if calls:
        texts = [*([message["content"]] if message["content"] else []), *calls_text(calls)]
        kept["content"] = "\n".join(texts)
    return kept


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def calls_text(calls: Sequence[str]) -> list[str]:
    return [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
