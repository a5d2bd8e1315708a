"""Runs an engine on a thread of its own, so that many callers, blocking or async, can share it."""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.kernels import native

logger = logging.getLogger(__name__)

Event = StepOutput | PacelineError
Listener = Callable[[Event], None]
"""Called on the engine's thread: hand the event over and return. An error is the last thing a listener hears."""


class EngineLoop:
    """The only thread that touches the engine. Callers send commands and hear back through their listeners."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards `_closed` and `_listeners`
        self._closed = False
        self._listeners: dict[str, Listener] = {}
        self._unfinished: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Start a request. What is wrong with it is raised here and now; everything later goes to `listener`."""
        self.engine.validate(request)
        with self._lock:
            self._check_open()
            if request.id in self._listeners:
                raise InvalidRequest(f"a request with id {request.id!r} is already running", field="id")
            self._listeners[request.id] = listener
            self._commands.put(lambda: self._add(request))

    def cancel(self, request_id: str) -> None:
        """Stop a request and free all it holds before the next step. Its listener hears nothing more."""
        self.call(lambda: self._cancel(request_id))

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` on the engine's thread, between two steps."""
        with self._lock:
            self._check_open()
            self._commands.put(command)

    def close(self) -> None:
        """Cancel what is running and end the thread. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was shut down: make a new LLM")

    def _run(self) -> None:
        reason: PacelineError = EngineClosed("the engine was shut down while the request was running")
        try:
            with native.quiet_torch():
                while self._drain():
                    for output in self.engine.step():
                        self._deliver(output)
            for request_id in list(self._unfinished):
                self.engine.cancel(request_id)
        except Exception as error:
            logger.exception("the engine failed; its requests are given up")
            reason = EngineClosed(f"the engine failed: {error!r}")
            reason.__cause__ = error
        with self._lock:  # from here on nothing is accepted, so nobody can wait for an answer that never comes
            self._closed = True
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            _tell(listener, reason)

    def _drain(self) -> bool:
        """Carry out waiting commands; with nothing else to do, sleep until one comes. False: time to end."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request: Request) -> None:
        self._unfinished[request.id] = request.sampling.n
        try:
            self.engine.add(request)
        except PacelineError as error:
            _tell(self._forget(request.id), error)

    def _cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)
        self._forget(request_id)

    def _deliver(self, output: StepOutput) -> None:
        listener = self._listeners.get(output.request_id)
        if listener is None:  # cancelled earlier in the same step, by a sibling's broken listener
            return
        if output.finish_reason is not None:
            self._unfinished[output.request_id] -= 1
            if self._unfinished[output.request_id] == 0:
                self._forget(output.request_id)
        if not _tell(listener, output):
            self._cancel(output.request_id)

    def _forget(self, request_id: str) -> Listener | None:
        self._unfinished.pop(request_id, None)
        with self._lock:
            return self._listeners.pop(request_id, None)


def _tell(listener: Listener | None, event: Event) -> bool:
    """One caller's broken listener must not end the engine for all: False if it raised."""
    if listener is None:
        return True
    try:
        listener(event)
    except Exception:
        logger.exception("a listener failed; its request is cancelled")
        return False
    return True
