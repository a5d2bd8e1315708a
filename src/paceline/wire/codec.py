"""Encoding of messages as msgpack bytes, and strict decoding."""

from typing import Any, Generic, TypeVar

import msgspec

from paceline.core.errors import PacelineError

M = TypeVar("M")


class MalformedMessage(PacelineError):
    """The bytes are not a message of the protocol: no msgpack, an unknown tag, or a field of a wrong type or out of range."""


class Codec(Generic[M]):
    """One direction of a protocol: encodes any message, decodes only the message types given to it."""

    def __init__(self, messages: Any) -> None:
        """`messages` is a union of tagged `msgspec.Struct` types."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> M:
        """The message. Raises `MalformedMessage`."""
        try:
            return self._decoder.decode(data)
        # Core dataclasses validate themselves with PacelineError. Deep nesting raises RecursionError.
        # UnicodeDecodeError is a ValueError.
        except (msgspec.MsgspecError, PacelineError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise MalformedMessage(str(error)[:200]) from None
