"""The interface that every channel implements on the client side."""

from dataclasses import dataclass
from typing import Protocol

from paceline.transfer.transfer import TransferFailed
from paceline.wire.codec import MalformedMessage
from paceline.wire.transfer_messages import TO_CLIENT, KeepAlive, Refused, Reply


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    index: int
    chunk: int
    checksum: int
    data: memoryview
    """Bytes of the chunk, valid until the next call of the channel."""


class Channel(Protocol):
    """Used by one thread at a time. After a failed fetch the caller closes it."""

    def request(self, id: bytes, index: int, chunk: int, size: int) -> None:
        """Request a chunk of `size` bytes. At most `MAX_INFLIGHT_CHUNKS` requests may be open."""

    def receive(self, seconds: float) -> ReceivedChunk | KeepAlive | None:
        """The next reply, or None after `seconds`. Raises TransferFailed if the server refuses or is gone."""

    def is_broken(self) -> bool: ...

    def close(self) -> None: ...


def decode_reply(server: str, data: memoryview) -> Reply:
    """Raises TransferFailed for a refusal and for bytes that are no message; `server` names it in the error."""
    try:
        reply = TO_CLIENT.decode(data)
    except MalformedMessage as malformed:
        raise TransferFailed(f"{server} does not speak the transfer protocol: {malformed}") from None
    if isinstance(reply, Refused):
        raise TransferFailed(f"{server}: {reply.reason}")
    return reply


def require_keep_alive(reply: Reply) -> KeepAlive:
    """Raises TransferFailed for any other message."""
    if not isinstance(reply, KeepAlive):
        raise TransferFailed("the server sent a message that was not requested")
    return reply
