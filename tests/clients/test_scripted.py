"""The scripted model: a real server, whose parsers and prefix cache do what they do for any model."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.clients.conftest import SCRIPT
from tests.clients.scripted import scripted_server

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with scripted_server(
        tmp_path_factory.mktemp("models") / "scripted", SCRIPT, **{"speculation.depth": "fixed"}
    ) as process:
        yield OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)


def test_two_turns_with_a_tool_and_a_long_prompt(client: OpenAI) -> None:
    """Turn 2 finds all of turn 1 in the cache, but for its last block."""
    system = "One of the rules. " * 2000
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": "Weather in Rome?"}]
    first = client.chat.completions.create(model="claude-opus-5-5", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'  # type: ignore[union-attr]
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 17 degrees"}]
    second = client.chat.completions.create(model="local", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is sunny in Rome: 17 degrees."
    assert first.usage
    assert second.usage
    assert second.usage.prompt_tokens_details
    assert first.usage.prompt_tokens > 8000
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 16


@pytest.mark.parametrize("is_enabled", [True, False])
def test_drafts_do_not_change_what_it_says(client: OpenAI, is_enabled: bool) -> None:
    text = dict(SCRIPT)["get_weather"]
    messages: Any = [{"role": "user", "content": f"Repeat this: {text}"}]
    extra = {"speculation": {"enabled": is_enabled, "method": "ngram"}}
    answer: Any = client.chat.completions.create(model="local", messages=messages, extra_body=extra)
    assert answer.choices[0].message.content == text
    assert (answer.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0) == is_enabled
