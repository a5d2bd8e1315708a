"""Requests of commands and learners to a running server."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import InvalidRequest, PacelineError

TIMEOUT = 30.0
"""Seconds that the server has to answer."""
TEMPORARY = (409, 429)
"""Statuses of refusals that a later attempt may not meet: another trial runs, a rate limit."""


class ServerUnavailable(PacelineError):
    """The server does not answer, or refuses for now: try again later."""


class ServerClient:
    """The routes of one server, as JSON. Refusals are `InvalidRequest` with the text of the server."""

    def __init__(self, url: str, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, **query: object) -> Any:
        return self.send("GET", path, None, **query)

    def send(self, method: str, path: str, body: object = None, **query: object) -> Any:
        """The document that the server returns."""
        try:
            return json.loads(self.text(path, method, body, **query) or "null")
        except ValueError:
            raise InvalidRequest(f"{self.url}{path} is no route of Paceline: it did not return JSON") from None

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """The events of a stream, as they arrive. Closing the iterator ends the request."""
        headers = {**self._headers, "content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(self.url, path, error) from None
        except OSError as error:
            raise ServerUnavailable(f"the server at {self.url} ended the answer: {error}") from None

    def text(self, path: str, method: str = "GET", body: object = None, **query: object) -> str:
        """Sends a request and returns the response as text."""
        data, headers = None, dict(self._headers)
        if body is not None:
            data = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        address = self.url + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            request = urllib.request.Request(address, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                content: bytes = answer.read()
                return content.decode()
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(self.url, path, error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            why = (isinstance(reason, OSError) and reason.strerror) or reason
            hint = "start one with `paceline serve`, or give its URL"
            raise ServerUnavailable(f"no server answers at {self.url} ({why}): {hint}") from None


def _refusal(url: str, path: str, error: urllib.error.HTTPError) -> PacelineError:
    is_admin = path.startswith("/admin")
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {error.code}"
    if error.code in (401, 403):
        scope = "admin" if is_admin else "metrics"
        return InvalidRequest(f"{url}{path} needs an API key with the scope `{scope}`")
    if error.code == 404 and is_admin:
        return InvalidRequest(f"{url}{path}: no admin routes (set `admin_key` or `api_keys` there), or no such model")
    if error.code == 503:
        return ServerUnavailable(f"{url} is not ready: {message}")
    if error.code in TEMPORARY or error.code >= 500:
        return ServerUnavailable(f"{url}{path}: {message}")
    return InvalidRequest(f"{url}{path}: {message}")
