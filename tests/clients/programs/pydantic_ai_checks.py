"""pydantic-ai: agents on chat, responses and messages."""

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
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


class Place(BaseModel):
    """A city."""

    city: str
    country: str


def openai() -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


MODELS: dict[str, Any] = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=openai()),
    "responses": lambda: OpenAIResponsesModel(MODEL, provider=openai()),
    "messages": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 128, "timeout": 1800}


async def answer(model: Model) -> None:
    agent = Agent(model, model_settings={**SETTINGS, "max_tokens": TOKENS})  # type: ignore[typeddict-item]
    text = (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as stream:
        same_text(text, await stream.get_output())


async def loop(model: Model) -> None:
    agent = Agent(model, tools=[get_weather], model_settings=SETTINGS)  # type: ignore[arg-type]
    result = await agent.run(WEATHER_QUESTION, usage_limits=UsageLimits(request_limit=6))
    parts = [part for message in result.all_messages() for part in message.parts]
    called([part.tool_name for part in parts if isinstance(part, ToolCallPart)])
    told(result.output)


for name, make in MODELS.items():
    check("text", f"{name}: answer, stream")(lambda make=make: answer(make()))  # type: ignore[misc]
    check("tools", f"{name}: agent with a tool, two turns")(lambda make=make: loop(make()))  # type: ignore[misc]


@check("schema", "chat: output type as a tool")
async def output_tool() -> None:
    place = (await Agent(MODELS["chat"](), output_type=Place, model_settings=SETTINGS).run(CITY_QUESTION)).output  # type: ignore[arg-type]
    is_city(place.city, place.country)


@check("schema", "chat: `NativeOutput`")
async def native_output() -> None:
    agent = Agent(MODELS["chat"](), output_type=NativeOutput(Place), model_settings=SETTINGS)  # type: ignore[arg-type]
    place = (await agent.run(CITY_QUESTION)).output
    is_city(place.city, place.country)


if __name__ == "__main__":
    main()
