"""llama.cpp's own server (`llama-server`) as an endpoint."""

from collections.abc import Sequence

from paceline.core.sampling import SamplingParams
from paceline.endpoints.endpoint import Endpoint, Message


class LlamaCppEndpoint(Endpoint):
    """Drafts by token ids. It does not verify: the server has no log-probabilities of prompt tokens."""

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
