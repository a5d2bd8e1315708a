"""The server of llama-cpp-python (`python -m llama_cpp.server`) as a draft endpoint."""

from collections.abc import Sequence

from paceline.core.sampling import SamplingParams
from paceline.endpoints.endpoint import Endpoint, Message
from paceline.endpoints.http_client import EndpointLacks
from paceline.endpoints.servers.openai import continuation


class LlamaCppPythonEndpoint(Endpoint):
    """Drafts with text. It does not verify: its log-probabilities name tokens by text."""

    kind = "llama-cpp-python's server"

    async def tokenize(self, text: str) -> list[int]:
        return list((await self._client.post("/extras/tokenize", {"input": text}))["tokens"])

    async def tokenize_prompt(self, text: str) -> list[int]:
        return await self.tokenize(text)

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        raise EndpointLacks(f"{self} has no route that renders a chat template")

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self._client.post("/extras/detokenize", {"tokens": list(ids)}))["text"])

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        text = await self.detokenize(ids)
        body = {"prompt": text, "max_tokens": depth, "temperature": 0}
        drafted = str((await self.complete(body, timeout))["text"])
        return await continuation(self, ids, text, drafted, depth)

    def refusal(self, sampling: SamplingParams) -> str | None:
        return (
            f"{self.kind} takes text and names log-probabilities by text, so that drafted token ids cannot be verified: "
            "use it as the draft"
        )

    @property
    def lists_vocabulary(self) -> bool:
        return False  # an id beyond the vocabulary ends the server
