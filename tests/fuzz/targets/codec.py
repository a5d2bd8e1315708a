"""Messages between workers and gateways. The first byte of an input chooses the reader, the rest is a message.

What a reader accepts must survive its own encoding, and everything else ends in `MalformedMessage`.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from paceline.drafting import branches
from paceline.transfer.weights.sources import (
    TO_WEIGHT_CLIENT,
    TO_WEIGHT_SERVER,
    decode_manifest,
    encode_manifest,
)
from paceline.wire import kv_events
from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.draft_messages import TO_DRAFT_WORKER, TO_TARGET
from paceline.wire.gateway_messages import TO_GATEWAY, TO_TARGET_WORKER
from paceline.wire.transfer_messages import TO_CLIENT, TO_SERVER
from tests.fuzz.mutations import change_value, mutate_bytes
from tests.fuzz.target import FuzzTarget

CODECS: tuple[Codec[Any], ...] = (
    *(TO_TARGET_WORKER, TO_GATEWAY, TO_DRAFT_WORKER, TO_TARGET),
    *(TO_SERVER, TO_CLIENT, TO_WEIGHT_SERVER, TO_WEIGHT_CLIENT),
)


def read_message(codec: Codec[Any]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        message = codec.decode(data)
        encoded = codec.encode(message)
        assert codec.encode(codec.decode(encoded)) == encoded, f"{message!r:.500} changes when it is encoded"

    return read


def read_events(data: bytes) -> None:
    events = kv_events.decode(data)
    if events:
        kv_events.decode(kv_events.encode(events, 0.0))


def read_manifest(data: bytes) -> None:
    manifest = decode_manifest(data)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def read_distributions(data: bytes) -> None:
    """The first byte is the number of tokens, and each token one byte."""
    count = data[0] % 8 if data else 0
    tokens = list(data[1 : 1 + count])
    rest = data[1 + count :]
    distributions = branches.decode(rest, tokens, 300)
    assert branches.encode(distributions) == rest


READERS = (*map(read_message, CODECS), read_events, read_manifest, read_distributions)


def fuzz(data: bytes) -> bool:
    if not data:
        return False
    try:
        READERS[data[0] % len(READERS)](data[1:])
    except MalformedMessage:
        return False
    return True


def mutate(data: bytes, rng: Random) -> bytes:
    """Other values in a message, or other bytes."""
    try:
        document = msgspec.msgpack.decode(data[1:])
        for _ in range(rng.randint(1, 3)):
            change_value(document, rng)
        if rng.random() < 0.7:
            return data[:1] + msgspec.msgpack.encode(document)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError):
        pass
    return data[:1] + mutate_bytes(data[1:], rng)


TARGETS = {"codec": FuzzTarget(fuzz, mutate, 4096)}
