"""The server as a learner uses it: samples, and trials of a draft inside its engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import PacelineError
from paceline.gateway import ServerClient, ServerUnavailable
from paceline.gateway.sessions import LearningSample, SampleBatch
from paceline.tools.learn.versions import TrialResult

TIMEOUT = 15.0
"""Seconds that the server has to answer."""

AFTER_ALL = 2**62
"""Number after those of all samples."""


class ServerFailure(PacelineError):
    """The server cannot be reached, or refuses a call. `is_temporary` says that a later call may succeed."""

    def __init__(self, message: str, is_temporary: bool) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class Trials(Protocol):
    """Where a draft is tried under load."""

    def in_use(self) -> str:
        """Name or folder of the draft in use. Raises `ServerFailure`."""
        ...

    def run(
        self, draft: Path, wait: Callable[[], bool], report: Callable[[str], None], is_tried: bool = True
    ) -> TrialResult | None:
        """Tries a draft under load, or uses it at once if not `is_tried`. `wait` pauses between two looks and returns False to
        give up. The draft before it then stays, and the verdict is None. Raises `ServerFailure`."""
        ...


class LearningServer:
    """A running server. It implements `Trials`, and `Samples` of the learner."""

    def __init__(self, url: str, key: str | None, model: str | None = None, trial_seconds: float = 600.0) -> None:
        self._server = ServerClient(url, key, TIMEOUT)
        self._model, self._trial_seconds = model, trial_seconds

    def check(self) -> None:
        """Raises the `ServerFailure` of a server that refuses its samples. One that does not answer now may do so later."""
        try:
            self.samples(AFTER_ALL)
        except ServerFailure as error:
            if not error.is_temporary:
                raise

    def samples(self, after: int) -> SampleBatch:
        content = self._call("GET", "/admin/learning/samples", after=after)
        try:
            samples = tuple(
                LearningSample(**entry | {name: tuple(entry[name]) for name in ("prompt", "output", "accepted")})
                for entry in content["samples"]
            )
            return SampleBatch(content["epoch"], content["last"], samples)
        except (KeyError, TypeError) as error:
            raise ServerFailure(f"{self._server.url} sent samples of another version: {error!r}", False) from None

    def in_use(self) -> str:
        return str(self._call("GET", "/admin/draft")["draft"])

    def run(
        self, draft: Path, wait: Callable[[], bool], report: Callable[[str], None], is_tried: bool = True
    ) -> TrialResult | None:
        state = self._start({"draft": str(draft), "seconds": self._trial_seconds if is_tried else 0.0}, wait)
        while state is not None and state["verdict"] == "continue":
            report(state["reason"])
            if not wait():
                self._call("DELETE", "/admin/draft")
                return None
            state = self._call("GET", "/admin/draft")
        if state is None:
            return None
        if state["candidate"] != str(draft):
            return TrialResult(False, None, f"another trial replaced it: {state['candidate']}")
        return TrialResult(state["verdict"] == "keep", state["gain"], state["reason"] or state["verdict"])

    def _start(self, swap: dict[str, Any], wait: Callable[[], bool]) -> dict[str, Any] | None:
        """Starts the trial, after the end of any trial under way."""
        while True:
            try:
                return self._call("POST", "/admin/draft", swap)
            except ServerFailure as error:
                if not error.is_temporary or not wait():
                    if error.is_temporary:
                        return None
                    raise

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        if self._model is not None:
            query, body = (query, {**body, "model": self._model}) if body else ({**query, "model": self._model}, body)
        try:
            content: dict[str, Any] = self._server.send(method, path, body, **query)
        except PacelineError as error:
            raise ServerFailure(str(error), isinstance(error, ServerUnavailable)) from None
        return content
