"""What a worker that starts and one that has the model already say to each other. The weights themselves go by transfer."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.core.errors import UnsupportedModel
from paceline.models.loading.weight_manifest import Manifest
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.wire.codec import Codec, Malformed
from paceline.runtime.wire.messages import Count, Goodbye, Message, Text

Reason = Annotated[str, Meta(max_length=512)]


class AskWeights(Message, frozen=True, tag=60):
    """May I have your weights? Answered by `Weights` or `NoWeights`."""

    form: Text
    """How the asking worker would hold them."""
    fingerprint: Text
    """Of its own copy of the checkpoint; empty without one."""


class AskPart(Message, frozen=True, tag=61):
    """Answered by `PartTicket` or `NoWeights`. The part asked for before is withdrawn."""

    part: Count


class Weights(Message, frozen=True, tag=70):
    manifest: Annotated[bytes, Meta(max_length=6 << 20)]
    """msgpack of `Manifest`."""


class PartTicket(Message, frozen=True, tag=71):
    part: Count
    ticket: Ticket
    """Of chunks that become ready as fast as the worker gives its weights away."""


class NoWeights(Message, frozen=True, tag=72):
    reason: Reason


FromTaker: TypeAlias = AskWeights | AskPart | Goodbye
FromGiver: TypeAlias = Weights | PartTicket | NoWeights | Goodbye

TO_GIVER: Codec[FromTaker] = Codec(FromTaker)
TO_TAKER: Codec[FromGiver] = Codec(FromGiver)

_DECODER = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Checked: a model could be put together by it."""
    try:
        manifest = _DECODER.decode(data)
        manifest.check()
    except (msgspec.MsgspecError, ValueError, UnsupportedModel) as error:
        raise Malformed(f"no manifest: {error}") from None
    return manifest
