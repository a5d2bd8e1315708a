"""Requests on their way from a gateway to the engine."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidRequest
from paceline.core.output import OutputListener, StepOutput
from paceline.core.request import Request, ValidatedRequest
from paceline.core.sequence import Origin
from paceline.wire.gateway_messages import (
    Cancel,
    FailureKind,
    HeartbeatRequest,
    RequestFailed,
    StatusRequest,
    Submit,
    TokensReply,
    TokensRequest,
)
from paceline.worker.server import engine_backend
from paceline.worker.server.engine_backend import EngineBackend
from paceline.worker.server.overload import WorkerOverload
from paceline.worker.server.resumable import KEEP_SECONDS
from paceline.worker.server.server import WorkerServer
from tests.engine.harness import GREEDY, PROMPT, engine_of, request
from tests.processes.target_harness import WAIT

PEER = b"g"
SCHEMA = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}


class RecordingLoop:
    """Takes requests like the engine's loop, and generates nothing."""

    def __init__(self) -> None:
        self.engine = engine_of(tokenizer=True)
        self.is_running = True
        self.error: Exception | None = None
        self.listeners: dict[str, OutputListener] = {}

    def submit(self, request: Request, listener: OutputListener) -> None:
        if self.error is not None:
            raise self.error
        self.listeners[request.id] = listener

    def cancel(self, request_id: str) -> None:
        self.listeners.pop(request_id, None)


class RecordingListener:
    """A listener that delivers nothing, and keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_gone = False
        """Whether it refuses all messages."""
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()

    def send(self, peer: bytes, message: Any) -> bool:
        if not self.is_gone:
            self.sent.append(message)
        return not self.is_gone


class Setup:
    def __init__(self) -> None:
        self.loop = RecordingLoop()
        self.listener = RecordingListener()
        self.backend = EngineBackend("a", self.loop)  # type: ignore[arg-type]
        self.used = 0
        """Bytes that the process uses, of 100."""
        self.overload = WorkerOverload(100, lambda: self.used, lambda: None)
        self.server = WorkerServer("a", self.listener, self.backend, VirtualClock(), self.overload)  # type: ignore[arg-type]

    @property
    def jobs(self) -> list[int]:
        return list(self.server._sessions.heard(PEER).jobs)

    def handle(self, message: Any) -> Any:
        """The last message that the server has sent after this message."""
        self.server._handle(PEER, message)
        self.server._sessions.send_events()
        return self.listener.sent[-1] if self.listener.sent else None

    def submit(self, attempt: int, resume_key: str = "", **sampling: Any) -> None:
        asked = replace(request("r", PROMPT, **{**GREEDY, **sampling}), resume_key=resume_key)
        self.handle(Submit(self.server.epoch, attempt, ValidatedRequest.of(asked)))

    def tokens(self, number: int, key: str) -> TokensReply:
        self.handle(TokensRequest(number, key))
        return next(message for message in reversed(self.listener.sent) if isinstance(message, TokensReply))

    @property
    def failures(self) -> list[tuple[int, FailureKind, str]]:
        failed = [message for message in self.listener.sent if isinstance(message, RequestFailed)]
        return [(message.attempt, message.kind, message.message) for message in failed]


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.backend._grammars.close()


FIRST, SECOND = "r#1@67", "r#2@67"
"""Ids in the engine of two attempts of the request `r`."""


def test_an_attempt_has_its_own_id_in_the_engine(setup: Setup) -> None:
    """The engine may have two attempts of a request, and two gateways may use the same id."""
    setup.submit(1)
    setup.submit(2)
    setup.server._handle(b"h", Submit(setup.server.epoch, 1, request("r", PROMPT, **GREEDY)))
    assert list(setup.loop.listeners) == [FIRST, SECOND, "r#1@68"]
    setup.server._drop(b"h")
    assert setup.jobs == [1, 2]
    setup.handle(Cancel([1, 7]))
    assert list(setup.loop.listeners) == [SECOND]
    setup.server._drop(PEER)
    assert setup.loop.listeners == {}
    assert setup.jobs == []


def test_a_request_starts_when_its_grammar_is_compiled(setup: Setup) -> None:
    setup.submit(1, json_schema=SCHEMA)
    assert setup.loop.listeners == {}
    assert setup.listener.woken.wait(WAIT)
    setup.backend.poll(0.0)
    assert list(setup.loop.listeners) == [FIRST]


def test_a_request_that_is_cancelled_before_its_grammar_is_compiled_does_not_start(setup: Setup) -> None:
    setup.submit(1, json_schema=SCHEMA)
    setup.handle(Cancel([1]))
    assert setup.listener.woken.wait(WAIT)
    setup.backend.poll(0.0)
    assert setup.loop.listeners == {}
    assert setup.failures == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidRequest("too long"), "too long"),
        (ValueError("a secret"), "the request cannot be served (ValueError): change its parameters"),
    ],
)
def test_a_request_that_cannot_start_fails_alone(setup: Setup, error: Exception, text: str) -> None:
    setup.submit(1)
    setup.loop.error = error
    setup.submit(2)
    assert setup.jobs == [1]
    assert setup.failures == [(2, FailureKind.INVALID, text)]


def test_a_recalled_stream_ends_and_its_tokens_expire(setup: Setup) -> None:
    setup.submit(1, resume_key="key", seed=7)
    setup.submit(2, resume_key="other")
    setup.loop.listeners[FIRST](StepOutput(FIRST, 0, 0, (5, 6), (Origin.PLAIN,) * 2))
    assert setup.tokens(3, "unknown") == TokensReply(3, None, [])
    assert setup.tokens(4, "key") == TokensReply(4, 7, [[5, 6]])
    assert list(setup.loop.listeners) == [SECOND]
    assert [(attempt, kind) for attempt, kind, _ in setup.failures] == [(1, FailureKind.FAILED)]
    setup.backend.poll(1.0)
    setup.backend.poll(1.0 + KEEP_SECONDS)
    assert setup.tokens(5, "key").choices == [[5, 6]]
    setup.backend.poll(1.0 + KEEP_SECONDS + engine_backend.EXPIRY_SECONDS)
    assert setup.tokens(6, "key") == TokensReply(6, None, [])
    assert list(setup.loop.listeners) == [SECOND]


def test_tokens_of_a_gateway_that_takes_no_messages_are_kept(setup: Setup) -> None:
    """The gateway of the stream is gone, and its client comes back through another."""
    setup.submit(1, resume_key="key", seed=7)
    setup.listener.is_gone = True
    for token in (5, 6):
        setup.loop.listeners[FIRST](StepOutput(FIRST, 0, 0, (token,), (Origin.PLAIN,)))
        setup.server._sessions.send_events()
    assert setup.jobs == [1]
    setup.listener.is_gone = False
    assert setup.tokens(1, "key") == TokensReply(1, 7, [[5, 6]])


def test_a_full_memory_refuses_new_requests_and_passes_the_longest_on(setup: Setup) -> None:
    """The gateway continues what the worker refuses on another worker, or here when there is room again."""

    def observe(used: int, now: float) -> bool:
        setup.used = used
        return setup.overload.poll(now)

    def symptoms() -> list[str]:
        return [symptom.name for symptom in setup.handle(StatusRequest()).status.symptoms]

    setup.submit(1)
    setup.submit(2)
    setup.loop.listeners[SECOND](StepOutput(SECOND, 0, 0, (3, 4), (Origin.PLAIN,) * 2))
    setup.handle(HeartbeatRequest(1))  # sends the output, which makes the second one the longest
    assert not observe(85, 1.0)
    assert symptoms() == ["memory_large_bodies"]
    setup.submit(3)
    assert setup.failures == []
    assert not observe(91, 2.0)
    setup.submit(4)
    assert setup.failures == [(4, FailureKind.LOST, "the memory of a is almost full")]
    assert setup.handle(HeartbeatRequest(2)).is_overloaded
    assert symptoms() == ["memory_new_requests"]
    assert observe(97, 3.0)
    setup.server._pass_on_longest()
    setup.server._sessions.send_events()
    assert setup.failures[1:] == [(2, FailureKind.LOST, "the memory of a is full")]
    assert list(setup.loop.listeners) == [FIRST, "r#3@67"]
    assert not observe(97, 3.1)  # no reading is due
    for now in (10.0, 20.0, 30.0, 40.0):
        assert not observe(10, now)
    assert symptoms() == []
    assert not setup.handle(HeartbeatRequest(3)).is_overloaded
    setup.submit(5)
    assert len(setup.failures) == 2
