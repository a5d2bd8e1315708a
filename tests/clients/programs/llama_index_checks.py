"""LlamaIndex: `OpenAILike` for chat and completions, structured output, an agent."""

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
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Place(BaseModel):
    """A city."""

    city: str
    country: str


def model(max_tokens: int = 128, **options: Any) -> OpenAILike:
    known: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 1800}
    known |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, **options}
    return OpenAILike(model=MODEL, temperature=0, max_tokens=max_tokens, **known)


@check("text", "chat: answer, stream")
def chat() -> None:
    messages, llm = [ChatMessage(role="user", content=QUESTION)], model(TOKENS)
    same_text(llm.chat(messages).message.content, "".join(part.delta or "" for part in llm.stream_chat(messages)))


@check("text", "completions: answer, stream")
def completions() -> None:
    prompt, llm = "The capital of France is", model(8, is_chat_model=False)
    same_text(llm.complete(prompt).text, "".join(part.delta or "" for part in llm.stream_complete(prompt)))


@check("tools", "chat: `predict_and_call`")
def predict_and_call() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = model().predict_and_call([tool], user_msg=WEATHER_QUESTION, error_on_no_tool_call=False)
    called(
        [source.tool_name for source in answer.sources], answer.sources[0].raw_input["kwargs"] if answer.sources else 0
    )


@check("tools", "`FunctionAgent`: loop with a tool")
async def agent() -> None:
    loop = FunctionAgent(tools=[get_weather], llm=model())
    answer = await loop.run(WEATHER_QUESTION, max_iterations=6)
    called([call.tool_name for call in answer.tool_calls])
    told(answer.response.content)


@check("schema", "chat: `structured_predict`")
def structured() -> None:
    place = model().as_structured_llm(Place).complete(CITY_QUESTION).raw
    is_city(place.city, place.country)  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
