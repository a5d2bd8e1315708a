"""Messages to bytes and back. What does not decode is refused with a reason, never half understood."""

from typing import Any, Generic, TypeVar

import msgspec

from paceline.core.errors import PacelineError

M = TypeVar("M")


class Malformed(PacelineError):
    """Bytes that are no message of the protocol: not msgpack, an unknown tag, a field of a wrong type or beyond its limit."""


class Codec(Generic[M]):
    """One direction of a protocol: encodes any struct, decodes only the message types it was made for."""

    def __init__(self, messages: Any) -> None:
        """`messages`: a union of tagged `msgspec.Struct` types."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> M:
        try:
            return self._decoder.decode(data)
        # A hostile nesting depth ends in RecursionError; bad text in UnicodeDecodeError, which is a ValueError
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            raise Malformed(str(error)[:200]) from None
