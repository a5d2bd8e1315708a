"""anthropic: messages with its helpers, token counts, models."""

from typing import Any

from anthropic import Anthropic
from checks import (
    CITY_QUESTION,
    MODEL,
    QUESTION,
    TOKENS,
    URL,
    WEATHER_QUESTION,
    called,
    check,
    get_weather,
    is_city,
    main,
    same_text,
    told,
)
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=1800)
TOOL: dict[str, Any] = {"name": "get_weather", "description": get_weather.__doc__}
TOOL["input_schema"] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GREEDY = {"temperature": 0}


class Place(BaseModel):
    city: str
    country: str


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def text_of(message: Any) -> str:
    return "".join(part.text for part in message.content if part.type == "text")


@check("text", "messages: answer, stream")
def messages() -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "messages": question(QUESTION)}
    options |= {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
    options["extra_body"] = GREEDY
    message = client.messages.create(**options)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        same_text(text_of(message), text, text_of(stream.get_final_message()))


@check("text", "messages: count_tokens")
def count_tokens() -> None:
    short = client.messages.count_tokens(model=MODEL, messages=question("Hi")).input_tokens
    assert 0 < short < client.messages.count_tokens(model=MODEL, messages=question(QUESTION)).input_tokens


@check("text", "messages: stop_sequences")
def stop_sequences() -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "extra_body": GREEDY}
    text = text_of(client.messages.create(messages=question(QUESTION), **options))
    stop = text.split()[1]
    message = client.messages.create(messages=question(QUESTION), stop_sequences=[stop], **options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


@check("text", "models: list")
def models() -> None:
    assert [model.id for model in client.models.list()]


def turns(is_streamed: bool, tool: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 128, "tools": [tool], "extra_body": GREEDY}

    def turn(messages: list[Any]) -> Any:
        if not is_streamed:
            return client.messages.create(messages=messages, **options)
        with client.messages.stream(messages=messages, **options) as stream:
            return stream.get_final_message()

    conversation = question(WEATHER_QUESTION)
    message = turn(conversation)
    calls = [part for part in message.content if part.type == "tool_use"]
    called([call.name for call in calls], calls[0].input if calls else None)
    assert message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": get_weather("Rome")} for call in calls]
    conversation += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    told(text_of(turn(conversation)))


@check("tools", "messages: tools, two turns")
def tools() -> None:
    turns(False, TOOL)


@check("tools", "messages: streamed tools with `strict`, two turns")
def streamed_tools() -> None:
    turns(True, {**TOOL, "strict": True})


@check("schema", "messages: tool_choice any")
def forced_tool() -> None:
    tool = {**TOOL, "input_schema": {**TOOL["input_schema"], "additionalProperties": False}, "strict": True}
    options: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 128}
    message = client.messages.create(model=MODEL, messages=question(WEATHER_QUESTION), **options)
    assert [part.name for part in message.content if part.type == "tool_use"] == ["get_weather"]


@check("schema", "messages: parse")
def parse() -> None:
    options: dict[str, Any] = {"max_tokens": 128, "output_format": Place}
    place = client.messages.parse(model=MODEL, messages=question(CITY_QUESTION), **options).parsed_output
    assert place
    is_city(place.city, place.country)


if __name__ == "__main__":
    main()
