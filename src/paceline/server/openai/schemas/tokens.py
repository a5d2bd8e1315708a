"""POST /tokenize and /detokenize, in vLLM's shape."""

from typing import Annotated

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.server.openai.schemas.body import Body
from paceline.server.openai.schemas.chat import Tool
from paceline.server.openai.schemas.generation import TokenId
from paceline.server.openai.schemas.messages import Message


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    """Of a prompt; a conversation brings its own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("inconsistent", "give either prompt or messages", {"param": "prompt"})
        return self


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


class Detokenized(BaseModel):
    prompt: str
