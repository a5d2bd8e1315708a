"""The draft inside a running server, over its routes `/admin/draft`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.server.client import ServerClient, ServerUnavailable

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
        self._server, self._model = ServerClient(url, key), model

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
        query = {"model": self._model} if self._model and body is None else {}
        state: dict[str, Any] = self._server.send(method, "/admin/draft", body, **query)
        return state
