"""Tools and calls as text of a prompt."""

import json
from typing import Any

from paceline.server.openai.schemas.chat import Tool

HERMES_PROMPT = """\
You may call one or more functions to help with the user's request. Their signatures are between <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments between <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def template_tools(tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """The tools as chat templates expect them: without `strict`, which no template shows."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def write_tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with tools and calls as text in the Hermes format, for a chat template without tools."""
    texts = [_message_as_text(message) for message in messages]
    if not tools:
        return texts
    prompt = HERMES_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if texts[0]["role"] == "system":
        return [{"role": "system", "content": f"{texts[0]['content']}\n\n{prompt}"}, *texts[1:]]
    return [{"role": "system", "content": prompt}, *texts]


def _message_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}\n'
        "</tool_call>"
        for call in message.get("tool_calls", ())
    )
    content = "\n".join(part for part in (message["content"], calls) if part)
    return {"role": message["role"], "content": content}
