"""A target worker, gateways that disappear, and gateways that send what they should not."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.request import ValidatedRequest
from paceline.policy.health import StallDetector
from paceline.wire.draft_messages import VERSION, Goodbye, Hello
from paceline.wire.gateway_messages import (
    TO_GATEWAY,
    FailureKind,
    Heartbeat,
    HeartbeatRequest,
    Outputs,
    RequestFailed,
    Submit,
    Welcome,
)
from paceline.wire.transport import Connection
from paceline.worker.server import gateways
from paceline.worker.server.engine_backend import WorkerHung
from tests.engine.harness import GREEDY, PROMPT, request
from tests.engine.test_failures import WIDE
from tests.processes.target_harness import WAIT, WorkerThread, until


@contextmanager
def gateway_of(one: WorkerThread) -> Iterator[tuple[Connection[Any], int]]:
    """A connection to the worker after its handshake, and the worker's epoch."""
    connection: Connection[Any] = Connection(one.worker.address, TO_GATEWAY)
    try:
        connection.send(Hello(VERSION, 1, None))
        yield connection, receive(connection, Welcome).epoch
    finally:
        connection.close()
        one.stop()


def submission(epoch: int, attempt: int, max_tokens: int = 20) -> Submit:
    return Submit(epoch, attempt, ValidatedRequest.of(request("r", PROMPT, max_tokens=max_tokens, **GREEDY)))


def receive(connection: Connection[Any], kind: type[Any]) -> Any:
    """The next message of this type."""
    while not isinstance(message := connection.receive(WAIT), kind):
        assert message is not None
    return message


def test_requests_of_a_silent_gateway_are_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "GATEWAY_TIMEOUT", 0.2)
    one = WorkerThread("a", steps=2)
    connection: Connection[Any] = Connection(one.worker.address, TO_GATEWAY)
    try:
        connection.send(Hello(VERSION, 1, None))
        welcome = receive(connection, Welcome)
        asked = ValidatedRequest.of(request("r", PROMPT, max_tokens=20, **GREEDY))
        connection.send(Submit(welcome.epoch, 5, asked))
        failed = receive(connection, RequestFailed)
        assert (failed.attempt, failed.kind) == (5, FailureKind.LOST)
        assert "silent" in failed.message
    finally:
        connection.close()
        one.stop()


def test_a_worker_that_was_suspended_drops_no_gateway() -> None:
    """The clock moves after a message was handled: those of the suspended time are not read yet."""
    clock = VirtualClock()
    one = WorkerThread("a", steps=2, clock=clock)
    with gateway_of(one) as (connection, epoch):
        connection.send(submission(epoch, 5))
        until(lambda: one.listener.num_submitted == 1)
        one.run(lambda: clock.advance(2 * gateways.GATEWAY_TIMEOUT))
        connection.send(HeartbeatRequest(1))
        assert receive(connection, Heartbeat).attempts == [5]


def test_heartbeat_lists_the_attempts_of_its_gateway() -> None:
    with gateway_of(WorkerThread("a", steps=2)) as (connection, epoch):
        connection.send(submission(epoch, 5))
        connection.send(submission(epoch, 7))
        connection.send(HeartbeatRequest(1))
        assert receive(connection, Heartbeat).attempts == [5, 7]


def test_repeated_attempt_is_ignored() -> None:
    one = WorkerThread("a", steps=2)
    with gateway_of(one) as (connection, epoch):
        connection.send(submission(epoch, 5))
        connection.send(submission(epoch, 5, max_tokens=3))
        connection.send(HeartbeatRequest(1))
        receive(connection, Heartbeat)
        assert one.gate is not None
        one.gate.open()
        outputs: list[Any] = []
        while not any(output.finish_reason for output in outputs):
            outputs = receive(connection, Outputs).outputs
        assert outputs[-1].start + len(outputs[-1].tokens) == 20  # of the first one
        until(lambda: not one.engine.has_work)


def test_hello_of_another_version_gets_no_epoch() -> None:
    one = WorkerThread("a")
    connection: Connection[Any] = Connection(one.worker.address, TO_GATEWAY)
    try:
        connection.send(Hello(VERSION + 1, 1, None))
        message = connection.receive(WAIT)
        assert isinstance(message, Goodbye)
        assert "upgrade" in message.reason
    finally:
        connection.close()
        one.stop()


def test_schema_beyond_the_limits_fails_its_own_request() -> None:
    with gateway_of(WorkerThread("a")) as (connection, epoch):
        good = submission(epoch, 1)
        sampling = replace(good.request.sampling, json_schema=WIDE)
        connection.send(replace_request(good, 2, sampling=sampling))
        connection.send(good)
        outputs = receive(connection, Outputs).outputs
        assert {output.attempt for output in outputs} == {1}
        failed = receive(connection, RequestFailed)
        assert (failed.attempt, failed.kind, failed.field) == (2, FailureKind.INVALID, "response_format")


def replace_request(message: Submit, attempt: int, **changes: Any) -> Submit:
    return Submit(message.epoch, attempt, replace(message.request, **changes))


def test_engine_that_hangs_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WorkerThread("a", steps=2)
    failures: list[BaseException] = []
    monkeypatch.setattr("threading.excepthook", lambda args: failures.append(args.exc_value))
    with gateway_of(one) as (connection, epoch):
        one.backend._steps = StallDetector(0.2)
        one.engine.watch.step_seconds = 0.0
        one.engine.watch.begin = lambda *arguments: None  # type: ignore[method-assign]
        connection.send(submission(epoch, 1))
        assert isinstance(receive(connection, Goodbye), Goodbye)
        one.thread.join(WAIT)
        assert [type(failure) for failure in failures] == [WorkerHung]
    one.backend._loop.close()
