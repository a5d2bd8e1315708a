"""A target worker and gateways that disappear."""

from typing import Any

import pytest

from paceline.core.request import ValidatedRequest
from paceline.runtime.target_worker import worker
from paceline.runtime.wire.gateway_messages import TO_GATEWAY, FailureKind, RequestFailed, Submit, Welcome
from paceline.runtime.wire.messages import VERSION, Hello
from paceline.runtime.wire.transport import Connection
from tests.engine.harness import GREEDY, PROMPT, request
from tests.runtime.target_harness import WAIT, WorkerThread


def receive(connection: Connection[Any], kind: type[Any]) -> Any:
    """The next message of this type."""
    while not isinstance(message := connection.receive(WAIT), kind):
        assert message is not None
    return message


def test_requests_of_a_silent_gateway_are_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GATEWAY_TIMEOUT", 0.2)
    one = WorkerThread("a", steps=2)
    connection: Connection[Any] = Connection(one.worker.address, TO_GATEWAY)
    try:
        connection.send(Hello(VERSION, 1, ""))
        welcome = receive(connection, Welcome)
        asked = ValidatedRequest.of(request("r", PROMPT, max_tokens=20, **GREEDY))
        connection.send(Submit(welcome.epoch, 5, asked))
        failed = receive(connection, RequestFailed)
        assert (failed.attempt, failed.kind) == (5, FailureKind.LOST)
        assert "silent" in failed.message
    finally:
        connection.close()
        one.stop()
