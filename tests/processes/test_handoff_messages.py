"""Messages of the hand-off: round trip and limits."""

import msgspec
import pytest

from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.draft_messages import Message
from paceline.wire.gateway_messages import TO_GATEWAY, TO_TARGET_WORKER, Prefill, PrefillStarted
from paceline.wire.transfer_messages import TransferHandle

HANDLE = TransferHandle(b"0123456789abcdef", {"socket": "tcp://127.0.0.1:1"}, [1, 2, 3])
PREFILL = Prefill(7, 1, [1] * 16, "salt", 0, "layout", [0, 3], 2048)


@pytest.mark.parametrize(("codec", "message"), [(TO_TARGET_WORKER, PREFILL), (TO_GATEWAY, PrefillStarted(1, HANDLE))])
def test_a_message_decodes_to_itself(codec: Codec[Message], message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [{"ids": [-1]}, {"first": -1}, {"state_layers": [0] * 65}, {"layout": "x" * 300}, {"salt": "x" * 5000}],
)
def test_fields_beyond_their_limits_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        TO_TARGET_WORKER.decode(TO_TARGET_WORKER.encode(msgspec.structs.replace(PREFILL, **change)))
