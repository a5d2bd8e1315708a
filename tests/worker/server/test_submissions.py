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
from paceline.wire.gateway_messages import FailureKind, RequestFailed, Submit, TokensReply, TokensRequest
from paceline.worker.server import engine_backend as submissions
from paceline.worker.server.engine_backend import Submissions
from paceline.worker.server.gateways import KEEP_SECONDS, GatewaySession, GatewaySessions
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
        del self.listeners[request_id]


class SilentListener:
    def wake(self) -> None: ...

    def send(self, peer: bytes, message: Any) -> bool:
        return True


class Setup:
    def __init__(self) -> None:
        self.loop = RecordingLoop()
        self.gateways = GatewaySessions("a", SilentListener(), VirtualClock())  # type: ignore[arg-type]
        self.gateway = self.gateways.heard(PEER)
        self.woken = threading.Event()
        self.submissions = Submissions(self.loop, None, self.gateways, self.woken.set)  # type: ignore[arg-type]

    def submit(self, attempt: int, resume_key: str = "", **sampling: Any) -> None:
        one = replace(request("r", PROMPT, **{**GREEDY, **sampling}), resume_key=resume_key)
        self.submissions.submit(PEER, self.gateway, Submit(1, attempt, ValidatedRequest.of(one)))


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.submissions.close()


def failures(gateway: GatewaySession) -> list[tuple[int, FailureKind, str]]:
    return [(one.attempt, one.kind, one.message) for one in gateway.outbox if isinstance(one, RequestFailed)]


def test_requests_get_ids_of_the_worker(setup: Setup) -> None:
    """Two gateways may use the same id."""
    setup.submit(1)
    setup.submit(2)
    assert list(setup.loop.listeners) == ["0", "1"]
    assert list(setup.gateway.jobs) == [1, 2]
    setup.submissions.cancel(setup.gateway, 1)
    setup.submissions.cancel(setup.gateway, 7)
    assert list(setup.loop.listeners) == ["1"]
    setup.submissions.cancel_all(setup.gateway)
    assert setup.loop.listeners == {}
    assert setup.gateway.jobs == {}


def test_a_request_starts_when_its_grammar_is_compiled(setup: Setup) -> None:
    setup.submit(1, json_schema=SCHEMA)
    assert setup.loop.listeners == {}
    assert setup.woken.wait(WAIT)
    setup.submissions.poll(0.0)
    assert list(setup.loop.listeners) == ["0"]


def test_a_request_that_is_cancelled_before_its_grammar_is_compiled_does_not_start(setup: Setup) -> None:
    setup.submit(1, json_schema=SCHEMA)
    setup.gateway.jobs.clear()
    assert setup.woken.wait(WAIT)
    setup.submissions.poll(0.0)
    assert setup.loop.listeners == {}
    assert failures(setup.gateway) == []


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
    assert list(setup.gateway.jobs) == [1]
    assert failures(setup.gateway) == [(2, FailureKind.INVALID, text)]


def test_a_recalled_stream_ends_and_its_tokens_expire(setup: Setup) -> None:
    setup.submit(1, resume_key="key", seed=7)
    setup.submit(2, resume_key="other")
    setup.loop.listeners["0"](StepOutput("0", 0, 0, (5, 6), (Origin.PLAIN,) * 2))
    setup.gateways.send_events()
    assert setup.submissions.reply_with_tokens(TokensRequest(3, "unknown")) == TokensReply(3, None, [])
    assert setup.submissions.reply_with_tokens(TokensRequest(4, "key")) == TokensReply(4, 7, [[5, 6]])
    assert list(setup.loop.listeners) == ["1"]
    assert [(attempt, kind) for attempt, kind, _ in failures(setup.gateway)] == [(1, FailureKind.FAILED)]
    setup.submissions.poll(1.0)
    setup.submissions.poll(1.0 + KEEP_SECONDS)
    assert setup.submissions.reply_with_tokens(TokensRequest(5, "key")).choices == [[5, 6]]
    setup.submissions.poll(1.0 + KEEP_SECONDS + submissions.EXPIRY_SECONDS)
    assert setup.submissions.reply_with_tokens(TokensRequest(6, "key")) == TokensReply(6, None, [])
    assert list(setup.loop.listeners) == ["1"]
