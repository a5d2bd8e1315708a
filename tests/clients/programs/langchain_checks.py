"""LangChain: `ChatOpenAI` on chat and on responses, structured output, an agent."""

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
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """A city."""

    city: str
    country: str


def chat(max_tokens: int = 128, **options: Any) -> ChatOpenAI:
    known: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 1800}
    return ChatOpenAI(model=MODEL, temperature=0, max_tokens=max_tokens, **known, **options)


@check("text", "chat: answer, stream")
def answer() -> None:
    model = chat(TOKENS)
    same_text(model.invoke(QUESTION).text, "".join(chunk.text for chunk in model.stream(QUESTION)))


@check("text", "responses: answer, stream")
def responses() -> None:
    model = chat(TOKENS, use_responses_api=True)
    same_text(model.invoke(QUESTION).text, "".join(chunk.text for chunk in model.stream(QUESTION)))


def turns(model: ChatOpenAI, strict: bool | None) -> None:
    bound = model.bind_tools([get_weather], strict=strict)
    messages: list[Any] = [HumanMessage(WEATHER_QUESTION)]
    answer: Any = bound.invoke(messages)
    called([call["name"] for call in answer.tool_calls], answer.tool_calls[0]["args"] if answer.tool_calls else None)
    messages.append(answer)
    messages += [ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    told(bound.invoke(messages).text)


@check("tools", "chat: `bind_tools`, two turns")
def tools() -> None:
    turns(chat(), None)


@check("tools", "chat: `bind_tools(strict=True)`, two turns")
def strict_tools() -> None:
    turns(chat(), True)


@check("tools", "responses: `bind_tools`, two turns")
def response_tools() -> None:
    turns(chat(use_responses_api=True), None)


@check("tools", "`create_agent`: loop with a tool")
def agent() -> None:
    loop = create_agent(chat(), [get_weather])
    messages = loop.invoke({"messages": [HumanMessage(WEATHER_QUESTION)]}, {"recursion_limit": 8})["messages"]
    called([call["name"] for message in messages for call in getattr(message, "tool_calls", [])])
    told(messages[-1].text)


for method in ("json_schema", "function_calling"):

    @check("schema", f"chat: `with_structured_output`, `{method}`")
    def structured(method: Any = method) -> None:
        place: Any = chat().with_structured_output(Place, method=method).invoke(CITY_QUESTION)
        is_city(place.city, place.country)


@check("schema", "chat: `tool_choice` any, strict")
def forced_tool() -> None:
    answer: Any = chat().bind_tools([get_weather], tool_choice="any", strict=True).invoke(WEATHER_QUESTION)
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]


if __name__ == "__main__":
    main()
