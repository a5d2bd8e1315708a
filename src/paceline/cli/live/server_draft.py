"""The draft inside a running server, over its routes `/admin/draft`."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidRequest, PacelineError

TIMEOUT = 30.0
"""Seconds that the server has to answer."""
RETRY_SECONDS = 60.0
"""Time for which a server that does not answer is asked again."""


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    is_kept: bool
    draft: str
    """The draft in use after the trial."""
    reason: str


class ServerDraft:
    """The routes of one server."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        """`key`: an API key with the scope `admin`. `model`: needed if the server has several."""
        self._url, self._key, self._model = url.rstrip("/"), key, model

    def swap(
        self, folder: str, seconds: float, period: float, wait: Callable[[], None], report: Callable[[str], None]
    ) -> DraftVerdict:
        """Try a draft until its verdict. `wait` pauses between two questions; an interruption ends the trial."""
        name = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
        body = {"draft": name, "seconds": seconds, "period": period}
        state = self._call("POST", body | ({"model": self._model} if self._model else {}))
        try:
            while state["verdict"] == "continue":
                report(state["reason"])
                wait()
                state = self._read()
        except BaseException:
            self._call("DELETE")
            raise
        return DraftVerdict(state["verdict"] == "keep", state["draft"], state["reason"])

    def _read(self) -> dict[str, Any]:
        """The state. A server may restart its engine meanwhile."""
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                return self._call("GET")
            except ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _call(self, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        query = f"?model={self._model}" if self._model and body is None else ""
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/admin/draft{query}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                state: dict[str, Any] = json.load(answer)
                return state
        except urllib.error.HTTPError as error:
            with error:
                raise _error(self._url, error) from None
        except OSError as error:
            raise ServerUnavailable(f"{self._url} does not answer: {error}") from None


class ServerUnavailable(PacelineError):
    """The server does not answer now."""


def _error(url: str, error: urllib.error.HTTPError) -> PacelineError:
    if error.code == 503:
        return ServerUnavailable(f"{url} is not ready: see its log")
    if error.code in (401, 403):
        return InvalidRequest(f"{url} needs a key with the scope `admin`: set --api-key", field="api-key")
    if error.code == 404:
        text = "the server has no admin routes (set `admin_key` or `api_keys` there), or no such model"
        return InvalidRequest(f"{url}/admin/draft: {text}")
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = str(error)
    return InvalidRequest(f"{url}: {message}")
