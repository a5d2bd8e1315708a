"""llama.cpp as an endpoint: its own server (`llama-server`), and that of llama-cpp-python."""

from collections.abc import Sequence

from paceline.core.sampling import SamplingParams
from paceline.endpoints.endpoint import Endpoint, Message
from paceline.endpoints.http_client import EndpointLacks
from paceline.endpoints.servers.openai import continuation


class LlamaCppEndpoint(Endpoint):
    """Drafts by token ids. It does not verify, because the server has no log-probabilities of prompt tokens."""

    kind = "llama.cpp's server"

    async def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": True}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def tokenize_prompt(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        rendered = await self._client.post("/apply-template", {"messages": list(messages)})
        return await self.tokenize(rendered["prompt"])

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self._client.post("/detokenize", {"tokens": list(ids)}))["content"])

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        body = {
            "prompt": list(ids),
            "n_predict": depth,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": True,
            "ignore_eos": sampling.ignore_eos,
        }
        return tuple((await self._client.post("/completion", body, timeout))["tokens"][:depth])

    def refusal(self, sampling: SamplingParams) -> str | None:
        return (
            f"{self.kind} returns no log-probabilities of prompt tokens, so it cannot score a draft in one call: use it as "
            "the draft"
        )


class LlamaCppPythonEndpoint(Endpoint):
    """Drafts with text. It does not verify, because its log-probabilities name tokens by text."""

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
