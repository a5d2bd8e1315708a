"""Peers one version apart: what they do not know of each other is left out, and prompts are computed by the target."""

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.wire.codec import Codec, MalformedMessage
from paceline.runtime.wire.messages import Message, Record
from paceline.runtime.wire.stream_messages import (
    TO_GATEWAY,
    TO_TARGET_WORKER,
    Heartbeat,
    Prefill,
    PrefillStarted,
    WorkerAddress,
    WorkerList,
)

TICKET = TransferHandle(b"0123456789abcdef", {"socket": "tcp://127.0.0.1:1"}, [1, 2, 3])
PREFILL = Prefill(7, 1, [1] * 16, "salt", 0, "layout", [0, 3], 2048)


class OldAddress(Record, frozen=True):
    name: str
    address: str
    key: str = ""


class OldDrafters(Message, frozen=True, tag=24):
    workers: Annotated[list[OldAddress], Meta(max_length=4096)]


def test_a_target_of_the_version_before_reads_no_further_than_it_knows() -> None:
    draft, prefill = WorkerAddress("d", "tcp://a:1"), WorkerAddress("p", "tcp://a:2")
    data = TO_TARGET_WORKER.encode(WorkerList([draft], [prefill]))
    assert Codec[OldDrafters](OldDrafters).decode(data) == OldDrafters([OldAddress("d", "tcp://a:1")])


def test_a_gateway_of_the_version_before_names_no_prefill_workers() -> None:
    data = msgspec.msgpack.encode([24, [["d", "tcp://a:1", ""]]])
    assert TO_TARGET_WORKER.decode(data) == WorkerList([WorkerAddress("d", "tcp://a:1")], [])


def test_a_worker_of_the_version_before_has_a_shorter_pulse() -> None:
    message = TO_GATEWAY.decode(msgspec.msgpack.encode([43, 1, 2, 3, True, 4, 5, 6, 7]))
    assert isinstance(message, Heartbeat)
    assert message.prompt_tokens == 0


@pytest.mark.parametrize(("codec", "message"), [(TO_TARGET_WORKER, PREFILL), (TO_GATEWAY, PrefillStarted(1, TICKET))])
def test_there_and_back(codec: Codec[Message], message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [{"ids": [-1]}, {"first": -1}, {"state_layers": [0] * 65}, {"layout": "x" * 300}, {"salt": "x" * 5000}],
)
def test_what_is_beyond_the_limits_is_no_message(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        TO_TARGET_WORKER.decode(TO_TARGET_WORKER.encode(msgspec.structs.replace(PREFILL, **change)))
