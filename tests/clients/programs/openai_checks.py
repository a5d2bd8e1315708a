"""openai: chat, completions and responses, with its helpers."""

import json
from typing import Any

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
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=1800)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


class GetWeather(BaseModel):
    """The weather in a city now."""

    city: str


class Place(BaseModel):
    city: str
    country: str


def chat_tool(strict: bool | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": "get_weather", "description": get_weather.__doc__, "parameters": SCHEMA}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@check("text", "chat: answer, stream with usage")
def chat() -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": question(QUESTION), "temperature": 0, "max_tokens": TOKENS}
    text = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens
    same_text(text, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


@check("text", "completions: answer, stream")
def completions() -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    text = client.completions.create(**options).choices[0].text
    same_text(text, "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)))


@check("text", "models: list, retrieve")
def models() -> None:
    names = [model.id for model in client.models.list()]
    assert client.models.retrieve(names[0]).id == names[0]


def chat_turns(strict: bool | None) -> None:
    messages = question(WEATHER_QUESTION)
    options: dict[str, Any] = {"model": MODEL, "tools": [chat_tool(strict)], "temperature": 0, "max_tokens": 128}
    message = client.chat.completions.create(messages=messages, **options).choices[0].message
    calls = message.tool_calls or []
    called([call.function.name for call in calls], calls[0].function.arguments if calls else None)  # type: ignore[union-attr]
    messages.append(message)  # the object itself, with all its fields
    for call in calls:
        result = get_weather(**json.loads(call.function.arguments))  # type: ignore[union-attr]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    told(client.chat.completions.create(messages=messages, **options).choices[0].message.content)


@check("tools", "chat: tools, two turns")
def tools() -> None:
    chat_turns(None)


@check("tools", "chat: tools with `strict`, two turns")
def strict_tools() -> None:
    chat_turns(True)


@check("tools", "chat: streamed tools, two turns, helper `stream`")
def streamed_tools() -> None:
    messages = question(WEATHER_QUESTION)
    options: dict[str, Any] = {"model": MODEL, "tools": [pydantic_function_tool(GetWeather, name="get_weather")]}
    options |= {"temperature": 0, "max_tokens": 128}
    with client.chat.completions.stream(messages=messages, **options) as stream:
        message = stream.get_final_completion().choices[0].message
    calls = message.tool_calls or []
    called([call.function.name for call in calls], calls[0].function.arguments if calls else None)
    messages.append(message)  # with `parsed` and `parsed_arguments`
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather("Rome")})
    with client.chat.completions.stream(messages=messages, **options) as stream:
        told(stream.get_final_completion().choices[0].message.content)


@check("schema", "chat: tool_choice required")
def forced_tool() -> None:
    options: dict[str, Any] = {"tools": [chat_tool(True)], "tool_choice": "required", "max_tokens": 128}
    choice = client.chat.completions.create(model=MODEL, messages=question(WEATHER_QUESTION), **options).choices[0]
    assert choice.message.tool_calls
    assert "city" in json.loads(choice.message.tool_calls[0].function.arguments)  # type: ignore[union-attr]


@check("schema", "chat: parse")
def parse() -> None:
    options: dict[str, Any] = {"response_format": Place, "temperature": 0, "max_tokens": 128}
    message = client.chat.completions.parse(model=MODEL, messages=question(CITY_QUESTION), **options).choices[0].message
    assert message.parsed
    is_city(message.parsed.city, message.parsed.country)


RESPONSE_TOOL = {"type": "function", "name": "get_weather", "description": get_weather.__doc__, "parameters": SCHEMA}


@check("text", "responses: answer, stream")
def responses() -> None:
    options: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": TOKENS}
    text = client.responses.create(**options).output_text
    with client.responses.stream(**options) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        same_text(text, "".join(parts), stream.get_final_response().output_text)


@check("text", "responses: previous_response_id")
def previous_response() -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS}
    first = client.responses.create(input=QUESTION, **options)
    assert client.responses.create(input="And of Italy?", previous_response_id=first.id, **options).output_text


def response_turns(is_strict: bool, is_streamed: bool) -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 128}
    options["tools"] = [{**RESPONSE_TOOL, "strict": is_strict}]

    def turn(items: list[Any]) -> Any:
        if not is_streamed:
            return client.responses.create(input=items, **options)
        with client.responses.stream(input=items, **options) as stream:
            return stream.get_final_response()

    items = question(WEATHER_QUESTION)
    output = turn(items).output
    calls = [item for item in output if item.type == "function_call"]
    called([call.name for call in calls], calls[0].arguments if calls else None)
    items += output
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": get_weather("Rome")} for call in calls
    ]
    told(turn(items).output_text)


@check("tools", "responses: tools, two turns")
def response_tools() -> None:
    response_turns(is_strict=False, is_streamed=False)


@check("tools", "responses: streamed tools with `strict`, two turns")
def streamed_response_tools() -> None:
    response_turns(is_strict=True, is_streamed=True)


@check("schema", "responses: parse")
def response_parse() -> None:
    options: dict[str, Any] = {"text_format": Place, "temperature": 0, "max_output_tokens": 128}
    place = client.responses.parse(model=MODEL, input=CITY_QUESTION, **options).output_parsed
    assert place
    is_city(place.city, place.country)


if __name__ == "__main__":
    main()
