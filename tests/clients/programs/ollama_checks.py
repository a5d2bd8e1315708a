"""Ollama's Python client: chat, generate, tags, show."""

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
from ollama import Client
from pydantic import BaseModel

client = Client(host=URL, timeout=1800)


class Place(BaseModel):
    city: str
    country: str


def options(max_tokens: int = 128) -> dict[str, Any]:
    return {"model": MODEL, "options": {"temperature": 0, "num_predict": max_tokens}}


@check("text", "chat: answer, stream")
def chat() -> None:
    known = {**options(TOKENS), "messages": [{"role": "user", "content": QUESTION}]}
    text = client.chat(**known).message.content
    same_text(text, "".join(part.message.content or "" for part in client.chat(**known, stream=True)))


@check("text", "generate: answer, stream")
def generate() -> None:
    known = {**options(TOKENS), "prompt": QUESTION}
    text = client.generate(**known).response
    same_text(text, "".join(part.response for part in client.generate(**known, stream=True)))


@check("text", "list, show")
def models() -> None:
    names = [model.model for model in client.list().models]
    assert names[0]
    assert client.show(names[0]).details


@check("tools", "chat: tools, two turns")
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    message = client.chat(**options(), messages=messages, tools=[get_weather]).message
    calls = message.tool_calls or []
    called([call.function.name for call in calls], dict(calls[0].function.arguments) if calls else None)
    messages.append(message)
    messages += [{"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")} for _ in calls]
    told(client.chat(**options(), messages=messages, tools=[get_weather]).message.content)


@check("schema", "chat: `format` with a schema")
def schema() -> None:
    messages = [{"role": "user", "content": CITY_QUESTION}]
    text = client.chat(**options(), messages=messages, format=Place.model_json_schema()).message.content
    place = Place.model_validate_json(text or "")
    is_city(place.city, place.country)


if __name__ == "__main__":
    main()
