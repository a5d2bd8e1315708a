"""The clients of OpenAI, Anthropic and Ollama with the embedded model: a stream, and two turns with a tool."""

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.gateway.process import Process, server_process

MODEL = "smollm2"
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
SECONDS = 120


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with server_process() as process:
        yield process


def test_the_openai_client_continues_a_response(server: Process) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "strict": True, "parameters": SCHEMA}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        with client.responses.stream(
            model=MODEL, input=ASK, tools=tools, tool_choice="required", max_output_tokens=60, temperature=0
        ) as stream:
            kinds = [event.type for event in stream]
            first = stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        (call,) = first.output
        assert call.parsed_arguments.keys() == {"city"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        second = client.responses.create(
            model=MODEL, previous_response_id=first.id, input=[result], tools=tools, max_output_tokens=8
        )
        assert second.output_text
        assert second.usage.input_tokens > first.usage.input_tokens
        assert client.responses.input_tokens.count(model=MODEL, input=ASK, tools=tools).input_tokens == (
            first.usage.input_tokens
        )


def test_the_anthropic_client_sends_a_result_back(server: Process) -> None:
    tools: Any = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
    options: dict[str, Any] = {"model": MODEL, "tools": tools}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        with client.messages.stream(messages=ASK, max_tokens=60, tool_choice={"type": "any"}, **options) as stream:
            for _ in stream:
                pass
            first = stream.get_final_message()
        (call,) = first.content
        assert (call.type, call.name, call.input.keys(), first.stop_reason) == (
            *("tool_use", "get_weather"),
            *({"city"}, "tool_use"),
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny.", "is_error": False}
        turns: Any = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(messages=turns, max_tokens=8, **options)
        assert second.content[0].text
        counted = client.messages.count_tokens(messages=turns, **options).input_tokens
        assert counted == second.usage.input_tokens + second.usage.cache_read_input_tokens
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1023 maximum"):
            client.messages.create(messages=[{"role": "user", "content": "word " * 2000}], max_tokens=8, model=MODEL)


def test_the_ollama_client_sends_a_result_back(server: Process) -> None:
    with ollama.Client(host=server.url, timeout=SECONDS) as client:
        assert [model.model for model in client.list().models] == [MODEL]
        assert "completion" in client.show(MODEL).capabilities
        options = {"num_predict": 6, "temperature": 0}
        parts = list(client.chat(model=MODEL, messages=ASK, options=options, stream=True))
        assert "".join(part.message.content for part in parts)
        assert (parts[-1].done, parts[-1].eval_count) == (True, 6)
        answer = client.chat(model=MODEL, messages=ASK, format=SCHEMA, options={"num_predict": 60})
        assert "city" in answer.message.content
        call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
        tool = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": SCHEMA}}
        turns = [
            *ASK,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "Sunny.", "tool_name": "get_weather"},
        ]
        assert client.chat(model=MODEL, messages=turns, tools=[tool], options=options).message.content
        assert client.generate(model=MODEL, prompt="1 2 3 4", raw=True, options=options).response
        with pytest.raises(ollama.ResponseError, match="no route /api/embed"):
            client.embed(model=MODEL, input="hi")
