"""The interface of a server: tokens of text, drafts, and verification of drafts.

`HttpClient` exchanges JSON over HTTP with one server. `EndpointFailed` and `EndpointLacks` are the errors of endpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.request import SamplingParams
from paceline.core.sequence import FinishReason

if TYPE_CHECKING:
    import httpx

TIMEOUT = 600.0
CONNECT_TIMEOUT = 10.0


class EndpointFailed(PacelineError):
    """An endpoint cannot be reached, or answered with an error. `status` is the HTTP status, None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EndpointLacks(PacelineError):
    """An endpoint does not offer what the request needs."""


class HttpClient:
    """Calls the routes of one server. It is created by `connect`."""

    def __init__(self, client: "httpx.AsyncClient", url: str) -> None:
        self._client = client
        self.url = url
        """Base URL without `/v1`."""

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None, TIMEOUT)

    async def post(self, path: str, body: Mapping[str, Any], timeout: float = TIMEOUT) -> Any:
        """The JSON of the response. Raises `EndpointFailed` for an error status and after `timeout` seconds."""
        return await self._call("POST", path, body, timeout)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        import httpx

        url = self.url + path
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT))
        try:
            response = await self._client.request(method, url, json=body, timeout=limits)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointFailed(f"{url} cannot be reached: {error!r}; start the server or check the URL") from error
        if response.is_error:
            raise EndpointFailed(f"{url} answered {response.status_code}: {response.text[:500]}", response.status_code)
        try:
            return response.json()
        except ValueError:
            raise EndpointFailed(f"{url} did not answer with JSON: {response.text[:200]!r}") from None


@asynccontextmanager
async def connect(url: str, api_key: str | None = None) -> AsyncIterator[HttpClient]:
    """`url` with or without the final `/v1`."""
    try:
        import httpx
    except ImportError:
        raise MissingDependency("httpx", "a call of another server", "endpoints") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(headers=headers) as client:
        yield HttpClient(client, url.rstrip("/").removesuffix("/v1"))


Message = Mapping[str, Any]
"""One message of a conversation, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class EndpointRound:
    """One round, which has a draft to verify after the committed tokens."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    """Committed output tokens."""
    draft: tuple[int, ...]
    """A chain. It is empty for a plain step."""
    sampling: SamplingParams
    """With a seed."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the text. Only targets that do not report the end themselves need them."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All committed tokens."""
        return self.prompt + self.output

    @property
    def room(self) -> int:
        """Output tokens that the text may still have."""
        return self.sampling.max_tokens - len(self.output)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens that a round commits, first the accepted tokens and then the target's own. An end token is included."""

    tokens: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None = None
    """Why the text has ended. None if it continues."""


class Endpoint(ABC):
    """A server and the model that it serves. The routes for tokens are those of vLLM unless a subclass replaces them."""

    kind: ClassVar[str]
    """Name of the server in messages."""

    def __init__(self, client: HttpClient, model: str, max_model_len: int | None = None) -> None:
        self._client = client
        self.model = model
        self.max_model_len = max_model_len
        """Context window. None if the server does not report it."""

    @property
    def url(self) -> str:
        return self._client.url

    def __str__(self) -> str:
        return f"{self.kind} at {self.url}"

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text without the special tokens of its start. Special tokens in the text count as such."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def tokenize_prompt(self, text: str) -> list[int]:
        """Token ids of a text as the server encodes the prompt of a completion."""
        return list((await self._client.post("/tokenize", {"model": self.model, "prompt": text}))["tokens"])

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template. Raises `EndpointFailed` if it has none."""
        body = {"model": self.model, "messages": list(messages)}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        if not ids:
            return ""
        return str((await self._client.post("/detokenize", {"model": self.model, "tokens": list(ids)}))["prompt"])

    @abstractmethod
    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        """At most `depth` tokens that continue `ids`. Any tokens are valid, because the target verifies them."""

    def refusal(self, sampling: SamplingParams) -> str | None:
        """The reason why this server cannot verify drafts exactly with these parameters. None if it can."""
        return f"{self.kind} has no route that scores drafts: use it as the draft"

    async def verify(self, round_: EndpointRound) -> Outcome:
        """The outcome of one round, from one call that scores all drafted tokens. Call it only without a `refusal`."""
        raise EndpointLacks(f"{self} cannot verify drafts")

    @property
    def reports_ends(self) -> bool:
        """Whether `verify` finds the end of the text without `EndpointRound.ends`."""
        return False

    @property
    def lists_vocabulary(self) -> bool:
        """Whether `detokenize` takes any ids, special tokens and ids beyond the vocabulary included."""
        return True

    async def is_end(self, token: int) -> bool:
        """Whether the server ends a text at this token."""
        body = {
            "model": self.model,
            "prompt": [token],
            "max_tokens": 1,
            "temperature": 0,
            "logit_bias": {str(token): 100},
        }
        return bool((await self._client.post("/v1/completions", body))["choices"][0]["finish_reason"] == "stop")

    async def complete(self, body: Mapping[str, Any], timeout: float | None = None) -> Mapping[str, Any]:
        """The first choice of a completion."""
        body = {"model": self.model, **body}
        answer = await (
            self._client.post("/v1/completions", body)
            if timeout is None
            else self._client.post("/v1/completions", body, timeout)
        )
        try:
            return dict(answer["choices"][0])
        except (KeyError, IndexError, TypeError):
            raise EndpointFailed(f"{self} sent a completion without choices: {str(answer)[:200]}") from None
