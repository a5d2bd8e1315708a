"""LiteLLM: its providers `openai`, `hosted_vllm`, `anthropic` and `ollama_chat`, and its responses."""

import json
from typing import Any

import litellm
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

PROVIDERS = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}
TOOL = {"name": "get_weather", "description": get_weather.__doc__}
TOOL["parameters"] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}  # type: ignore[assignment]


class Place(BaseModel):
    city: str
    country: str


def options(provider: str) -> dict[str, Any]:
    known = {"model": f"{provider}/{MODEL}", "api_base": PROVIDERS[provider], "api_key": "none", "timeout": 1800}
    return {**known, "num_retries": 0, "temperature": 0, "max_tokens": 128}


def answer(provider: str) -> None:
    known = {**options(provider), "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS}
    text = litellm.completion(**known).choices[0].message.content
    chunks = litellm.completion(**known, stream=True)
    same_text(text, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def turns(provider: str) -> None:
    known = {**options(provider), "tools": [{"type": "function", "function": TOOL}]}
    messages: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    message = litellm.completion(**known, messages=messages).choices[0].message
    calls = message.tool_calls or []
    called([call.function.name for call in calls], calls[0].function.arguments if calls else None)
    messages.append(message)
    for call in calls:
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    told(litellm.completion(**known, messages=messages).choices[0].message.content)


for provider in PROVIDERS:
    check("text", f"`{provider}`: answer, stream")(lambda provider=provider: answer(provider))  # type: ignore[misc]
    check("tools", f"`{provider}`: tools, two turns")(lambda provider=provider: turns(provider))  # type: ignore[misc]


@check("schema", "`openai`: response_format")
def response_format() -> None:
    messages = [{"role": "user", "content": CITY_QUESTION}]
    text = litellm.completion(**options("openai"), messages=messages, response_format=Place).choices[0].message.content
    place = Place.model_validate_json(text)
    is_city(place.city, place.country)


@check("text", "`openai`: responses")
def responses() -> None:
    known = {name: value for name, value in options("openai").items() if name not in ("max_tokens", "num_retries")}
    assert litellm.responses(**known, input=QUESTION, max_output_tokens=TOKENS).output[-1].content[0].text


if __name__ == "__main__":
    main()
