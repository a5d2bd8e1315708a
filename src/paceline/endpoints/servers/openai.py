"""Any other OpenAI-compatible server as a draft endpoint: text in, text out."""

from collections.abc import Sequence

from paceline.core.sampling import SamplingParams
from paceline.endpoints.endpoint import Endpoint, Message
from paceline.endpoints.http_client import EndpointLacks, HttpClient


class OpenAIEndpoint(Endpoint):
    """Drafts with text, which the target's tokenizer converts. A draft with other tokens costs speed and does not change the
    text."""

    kind = "an OpenAI-compatible server"

    def __init__(self, client: HttpClient, model: str, tokenizer: Endpoint) -> None:
        """`tokenizer` is the endpoint that converts between text and token ids."""
        super().__init__(client, model)
        self._tokenizer = tokenizer

    async def tokenize(self, text: str) -> list[int]:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def tokenize_prompt(self, text: str) -> list[int]:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def detokenize(self, ids: Sequence[int]) -> str:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        text = await self._tokenizer.detokenize(ids)
        body = {"prompt": text, "max_tokens": depth, "temperature": 0}
        drafted = str((await self.complete(body, timeout))["text"])
        return await continuation(self._tokenizer, ids, text, drafted, depth)


async def continuation(tokenizer: Endpoint, ids: Sequence[int], text: str, drafted: str, depth: int) -> tuple[int, ...]:
    """At most `depth` tokens of `drafted`, which continues `text`, the text of `ids`."""
    if not drafted:
        return ()
    tokens = await tokenizer.tokenize(text + drafted)
    if tokens[: len(ids)] == list(ids):
        return tuple(tokens[len(ids) : len(ids) + depth])
    return tuple((await tokenizer.tokenize(drafted))[:depth])
