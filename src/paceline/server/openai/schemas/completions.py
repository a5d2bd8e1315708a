"""POST /v1/completions."""

from typing import Annotated, ClassVar

from pydantic import Field

from paceline.server.openai.schemas.body import Refusals
from paceline.server.openai.schemas.generation import REFUSED_EVERYWHERE, GenerationBody, TokenId

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for a request that does not say."""

Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(GenerationBody):
    refused: ClassVar[Refusals] = {
        **REFUSED_EVERYWHERE,
        "suffix": (("",), "the model only writes forwards"),
        "echo": ((False,), "put the prompt in front yourself"),
        "best_of": ((1,), "ask for `n` choices with `logprobs` and pick one"),
    }

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[Ids], Field(min_length=1, max_length=128)]
    )
    """A text, a list of token ids, or a list of either."""
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
