"""JSON over HTTP with one server, and the errors of endpoints."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from paceline.core.errors import MissingDependency, PacelineError

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
