"""Requests of commands to a running server."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from paceline.core.errors import InvalidRequest, PacelineError

TIMEOUT = 30.0
"""Seconds that the server has to answer."""


class ServerUnavailable(PacelineError):
    """The server does not answer now; it may later."""


class ServerApi:
    """The routes of one server, as JSON. Refusals are `InvalidRequest` with the text of the server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, **query: object) -> Any:
        return self.send("GET", path, None, **query)

    def send(self, method: str, path: str, body: object = None, **query: object) -> Any:
        """The document that the server returns."""
        data, headers = None, dict(self._headers)
        if body is not None:
            data = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        address = self.url + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            request = urllib.request.Request(address, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise _refusal(self.url, path, error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ServerUnavailable(f"no server answers at {self.url}: {reason}") from None
        except ValueError:
            raise InvalidRequest(f"{address} is no route of Paceline: it did not return JSON") from None


def _refusal(url: str, path: str, error: urllib.error.HTTPError) -> PacelineError:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {error.code}"
    if error.code in (401, 403):
        return InvalidRequest(f"{url}{path} refused the key ({message}): set --api-key", field="api-key")
    if error.code == 503:
        return ServerUnavailable(f"{url} is not ready: {message}")
    return InvalidRequest(f"{url}{path}: {message}")
