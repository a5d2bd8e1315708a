"""Runs an engine on its own thread, shared by any number of blocking and async callers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError, RankLost
from paceline.core.output import OutputEvent, OutputListener, StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.engine.engine import Engine
from paceline.engine.failures import RequestFailure, contained, is_isolated, owner_error
from paceline.kernels.cpu import native
from paceline.requests import Grammar

logger = logging.getLogger(__name__)

IDLE_AFTER = 0.5
"""Seconds without work before idle work begins: a client that continues a conversation at once finds the engine free."""


class RequestTracer(Protocol):
    """Receives the outputs of one request, on the engine's thread."""

    def add(self, output: StepOutput) -> None: ...

    def end(self, error: PacelineError | None = None) -> None:
        """The request finished, was cancelled, or failed."""
        ...


class Tracer(Protocol):
    def follow(self, request: Request) -> RequestTracer:
        """A trace for a request that was just submitted. It is called from any thread."""
        ...


@dataclass(slots=True, eq=False)
class _Caller:
    """One submission of a request. Request ids may be used again; a caller is unique."""

    listener: OutputListener
    unfinished: int
    trace: RequestTracer | None = None
    cancelled: bool = False

    def send(self, event: OutputEvent) -> bool:
        """Pass the event to the listener; False if it raised. A listener that raises ends its own request only."""
        if self.cancelled:
            return True
        try:
            self.listener(event)
        except Exception:
            logger.exception("a listener failed; its request is cancelled")
            return False
        return True


@dataclass(slots=True, eq=False)
class _Alone:
    """A caller of `EngineLoop.alone`: requests submitted after it wait until it has finished."""

    deadline: float
    error: PacelineError
    """For the requests before it that are not finished at the deadline."""
    reached: "Future[None]" = field(default_factory=Future)
    held: list[Callable[[], None]] = field(default_factory=list)
    """Requests that wait, as commands."""
    waiting: set[str] = field(default_factory=set)
    """Their ids."""


class EngineLoop:
    """Owns the only thread that uses the engine. Callers queue commands; listeners receive the outputs."""

    def __init__(self, engine: Engine, tracer: Tracer | None = None) -> None:
        self.engine = engine
        self.tracer = tracer
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards `_closed` and `_callers`
        self._closed = False
        self._callers: dict[str, _Caller] = {}
        self._alone: _Alone | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._closed

    def submit(self, request: ValidatedRequest, listener: OutputListener) -> None:
        """Start a request. `listener` receives all outputs and later errors. Raises `InvalidRequest` if its id is in use."""
        grammar = self.engine.validator.grammar(request)  # compiled on the caller's thread
        with self._lock:
            self._check_open()
            if request.id in self._callers:
                raise InvalidRequest(f"a request with id {request.id!r} is already running", field="id")
            trace = self.tracer.follow(request) if self.tracer is not None and request.trace else None
            caller = self._callers[request.id] = _Caller(listener, len(request.unfinished), trace)
            self._commands.put(lambda: self._add(request, grammar, caller))

    def cancel(self, request_id: str) -> None:
        """Stop a request and free all it holds before the next step. Its listener receives nothing more."""
        with self._lock:
            self._check_open()
            caller = self._callers.get(request_id)
            if caller is not None:
                caller.cancelled = True
                self._commands.put(lambda: self._cancel(request_id, caller))

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` on the engine's thread, between two steps. An error of the command is logged."""
        with self._lock:
            self._check_open()
            self._commands.put(command)

    def run(self, command: Callable[[], None]) -> None:
        """Like `call`, but wait until the command is done, and raise its error. Raises `EngineClosed` if the engine's thread
        ends first."""
        done: Future[None] = Future()

        def execute() -> None:
            try:
                command()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.call(execute)
        self._wait(done)

    def _wait(self, done: "Future[None]") -> None:
        while not done.done():
            wait([done], 0.1)
            if not self._thread.is_alive() and not done.done():
                raise EngineClosed("the engine stopped before the command was done: see its log")
        done.result()

    @contextmanager
    def alone(self, seconds: float, error: PacelineError) -> Iterator[None]:
        """The engine has no request inside the block. Requests submitted before it are finished first; those that are not after
        `seconds` end with `error`. Requests submitted later wait until the block is left. Blocks; for threads other than the
        engine's. Raises `PacelineError` if another thread is in such a block."""
        alone = _Alone(time.monotonic() + seconds, error)
        self.run(lambda: self._enter(alone))
        try:
            self._wait(alone.reached)
            yield
        finally:
            with suppress(EngineClosed):
                self.run(lambda: self._leave(alone))

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
        """The engine's thread: commands, a step, its outputs, until `close` or a failure of the engine."""
        reason: PacelineError = EngineClosed("the engine was shut down while the request was running")
        try:
            with native.single_threaded_torch():
                while self._drain():
                    for output in self.engine.advance():
                        self._deliver(output)
                    self.engine.prepare_next()
                    for failure in self.engine.pop_failures():
                        self._fail(failure)
            for request_id in list(self._callers):
                self.engine.cancel(request_id)
        except BaseException as error:
            logger.exception("the engine failed; its requests end with an error")
            # The text of any other error may quote one request, and all callers receive this error
            text = str(error) if isinstance(error, RankLost) else "see its log"
            reason = EngineClosed(f"the engine failed with {type(error).__name__}: {text}")
            reason.__cause__ = error
        with self._lock:  # no caller is accepted after this, so that none waits for ever
            self._closed = True
            callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller.send(reason)
            if caller.trace is not None:
                caller.trace.end(reason)
        self.engine.close()

    def _drain(self) -> bool:
        """Run the queued commands, and those that arrive while the next step can wait. Without work, wait for one or use the
        idle time. False: the loop ends."""
        idle_from = time.monotonic() + IDLE_AFTER  # commands that bring no work do not move it
        while True:
            self._follow_alone()
            seconds: float | None = None
            if self.engine.has_work:
                seconds = self.engine.seconds_to_spare
            elif self.engine.hooks.has_idle_work:
                seconds = max(0.0, idle_from - time.monotonic())
            try:
                command = self._commands.get(timeout=seconds) if seconds != 0.0 else self._commands.get_nowait()
            except Empty:
                if self.engine.has_work:
                    return True
                self.engine.hooks.use_idle_time()
                continue
            if command is None:
                return False
            with contained("a command"):
                command()

    def _enter(self, alone: _Alone) -> None:
        if self._alone is not None:
            raise PacelineError("another change of the engine is under way: wait until it is done")
        self._alone = alone

    def _leave(self, alone: _Alone) -> None:
        self._alone = None
        for add in alone.held:
            add()

    def _follow_alone(self) -> None:
        """Let the caller of `alone` in once the requests before it have ended, at the latest at its deadline."""
        alone = self._alone
        if alone is None or alone.reached.done():
            return
        if self.engine.has_work and time.monotonic() >= alone.deadline:
            for request_id, caller in list(self._callers.items()):
                if request_id not in alone.waiting:
                    self.engine.cancel(request_id)
                    self._forget(request_id, alone.error)
                    caller.send(alone.error)
        if not self.engine.has_work:
            alone.reached.set_result(None)

    def _add(self, request: ValidatedRequest, grammar: Grammar | None, caller: _Caller) -> None:
        alone = self._alone
        if alone is not None:
            alone.held.append(lambda: self._add(request, grammar, caller))
            alone.waiting.add(request.id)
            return
        if caller.cancelled:  # while it waited
            return
        try:
            self.engine.add(request, grammar)
        except BaseException as error:
            if not is_isolated(error):
                raise
            self._fail(RequestFailure(request.id, owner_error(error)))

    def _fail(self, failure: RequestFailure) -> None:
        caller = self._callers.get(failure.request_id)
        if caller is not None:
            self._forget(failure.request_id, failure.error)
            caller.send(failure.error)

    def _cancel(self, request_id: str, caller: _Caller) -> None:
        if self._callers.get(request_id) is caller:  # otherwise it has finished, and another request may have its id
            self.engine.cancel(request_id)
            self._forget(request_id)

    def _deliver(self, output: StepOutput) -> None:
        caller = self._callers.get(output.request_id)
        if caller is None:  # cancelled earlier in this step, because its listener raised for another choice
            return
        caller.unfinished -= output.finish_reason is not None
        if caller.trace is not None:
            with contained("a trace"):
                caller.trace.add(output)
        if caller.unfinished == 0:
            self._forget(output.request_id)
        if not caller.send(output):
            self._cancel(output.request_id, caller)

    def _forget(self, request_id: str, error: PacelineError | None = None) -> None:
        with self._lock:
            caller = self._callers.pop(request_id, None)
        if caller is not None and caller.trace is not None:
            with contained("a trace"):
                caller.trace.end(error)
