"""Compiles the grammars of received requests, so that neither the worker's thread nor the engine's waits for it."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.request import Request
from paceline.engine.validator import RequestValidator

logger = logging.getLogger(__name__)

Continue = Callable[[PacelineError | None], None]
"""Receives the error of the schema. None if the grammar is compiled."""


class GrammarThread:
    """One thread. llguidance releases the interpreter's lock while it compiles; the validator keeps the grammar."""

    def __init__(self, validator: RequestValidator, wake: Callable[[], None]) -> None:
        """`wake` ends the wait of the thread that calls `run_finished`."""
        self._validator, self._wake = validator, wake
        self._queue: SimpleQueue[tuple[Request, Continue] | None] = SimpleQueue()
        self._finished: deque[tuple[Continue, PacelineError | None]] = deque()
        self._thread = threading.Thread(target=self._run, name="paceline-grammars", daemon=True)
        self._thread.start()

    def compile(self, request: Request, then: Continue) -> None:
        """Compile the grammar of the request, then let `run_finished` call `then`."""
        self._queue.put((request, then))

    def run_finished(self) -> None:
        """Continue the requests whose grammars are compiled, on the caller's thread."""
        while self._finished:
            then, error = self._finished.popleft()
            then(error)

    def close(self) -> None:
        """End the thread; requests that wait are dropped."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            request, then = item
            error: PacelineError | None = None
            try:
                self._validator.grammar(request)
            except PacelineError as failure:
                error = failure
            except BaseException as failure:  # a panic of llguidance is no `Exception`
                logger.error("a grammar could not be compiled", exc_info=failure)
                error = InvalidRequest(
                    f"the JSON schema cannot be used: {type(failure).__name__}", field="response_format"
                )
            self._finished.append((then, error))
            self._wake()
