"""Messages that a target worker receives: from gateways, and as a prefill worker from other targets.

A connection can break at any message. Every submission has a number (`attempt`) and every output its first position (`start`):
the gateway ignores stale outputs, detects missing ones, and continues from the token ids that it has.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.cluster.routing.kv_index import PeerHint
from paceline.core.errors import InvalidRequest
from paceline.core.request import Request
from paceline.core.speculation import SpeculationFlags
from paceline.runtime.wire.codec import Codec, MalformedMessage
from paceline.runtime.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_NAME,
    MAX_OUTPUTS,
    MAX_SALT,
    Count,
    Goodbye,
    Hello,
    Large,
    LongText,
    Message,
    Name,
    NonNegative,
    Record,
    Salt,
    Tokens,
)

MAX_WORKERS = 4096


class Submit(Message, frozen=True, tag=20):
    """Generate. Answered by `Outputs` until every choice is finished, or by `RequestFailed`."""

    epoch: Large
    """Epoch of the worker, from its `Welcome`."""
    attempt: Large
    """Number of this submission. The gateway ignores outputs of other attempts."""
    request: Request
    peer: PeerHint | None = None
    """Another target that holds the beginning of the prompt in its cache."""


class Cancel(Message, frozen=True, tag=21):
    """Stop these submissions and free their blocks. No answer."""

    attempts: Annotated[list[Large], Meta(max_length=MAX_OUTPUTS)]


class HeartbeatRequest(Message, frozen=True, tag=22):
    """Answered by a `Heartbeat`. A worker drops the streams of a gateway that stays silent."""

    nonce: Large


class SetFlags(Message, frozen=True, tag=23):
    """Run-time settings of speculation, in effect from the next step."""

    flags: SpeculationFlags


class WorkerAddress(Record, frozen=True):
    name: Name
    address: Name
    key: Name = ""
    """Public key. Empty without encryption."""
    is_on_trial: bool = False
    """Whether a draft worker gets only a share of the sequences, see `cluster/pairing/draft_trial.py`."""


class WorkerList(Message, frozen=True, tag=24):
    """All workers that a target may connect to."""

    drafts: Annotated[list[WorkerAddress], Meta(max_length=MAX_WORKERS)]
    prefillers: Annotated[list[WorkerAddress], Meta(max_length=MAX_WORKERS)] = msgspec.field(default_factory=list)
    peers: Annotated[list[WorkerAddress], Meta(max_length=MAX_WORKERS)] = msgspec.field(default_factory=list)
    """Other targets. Empty where targets do not share cached blocks."""


class StatusRequest(Message, frozen=True, tag=25):
    """Answered by a `StatusReport`."""


class Prefill(Message, frozen=True, tag=26):
    """From a target to a prefill worker, which computes these tokens and offers the KV blocks from block `first` on. Answered
    by `PrefillStarted` or `RequestFailed`. It is ended by `Cancel`, or when the target stays silent.
    """

    epoch: Large
    """Epoch of the prefill worker, from its `Welcome`."""
    attempt: Large
    ids: Tokens
    """Tokens of whole blocks."""
    salt: Salt
    first: Count
    layout: Name
    """Layout of the target's KV cache. The worker rejects another layout than its own."""
    state_layers: Annotated[list[Count], Meta(max_length=64)]
    """Layers whose hidden states are sent too."""
    state_rows: Count
    """Number of last tokens whose hidden states are sent."""
    in_place: bool = False
    """Whether the target reads the blocks from the worker's device memory: it has opened `Welcome.memory`."""


class TokensRequest(Message, frozen=True, tag=27):
    """Give the tokens of a resumable stream, and stop it if it runs: its client has come back through this gateway.

    Answered by `TokensReply`.
    """

    number: Large
    key: Name


class SwapDraft(Message, frozen=True, tag=28):
    """Try another draft inside the engine, under load. The status of the worker reports the trial. A worker that already tries
    a draft ignores the message."""

    number: Large
    """Number of this swap, chosen by the gateway."""
    draft: LongText
    """Name or folder, as `draft` of the engine. An empty name ends the trial, and the draft before it stays."""
    seconds: NonNegative = 600.0
    """Longest time of the trial. With 0 the draft is used at once."""
    period: NonNegative = 4.0
    """Time for which a draft is used before the trial may switch to the second draft."""


FromGateway: TypeAlias = (
    Hello
    | Submit
    | Cancel
    | HeartbeatRequest
    | SetFlags
    | WorkerList
    | StatusRequest
    | Prefill
    | TokensRequest
    | SwapDraft
    | Goodbye
)

TO_TARGET_WORKER: Codec[FromGateway] = Codec(FromGateway)


def check_limits(request: Request) -> None:
    """Raise `InvalidRequest` if a field is longer than other messages of the protocol can carry."""
    for name, text, limit in (
        ("category", request.category, MAX_NAME),
        ("cache_salt", request.cache_salt, MAX_SALT),
        ("resume_key", request.resume_key, MAX_NAME),
        ("trace", request.trace, MAX_NAME),
    ):
        if len(text) > limit:
            raise InvalidRequest(f"{name} must have at most {limit} characters, got {len(text)}", field=name)


def check_size(request: Request) -> None:
    """Raise `InvalidRequest` if a worker could not decode the request."""
    check_limits(request)
    try:
        data = TO_TARGET_WORKER.encode(Submit(0, 0, request))
        # The second half is for the generated tokens, in case another worker continues the request
        if len(data) > MAX_MESSAGE_BYTES // 2:
            raise InvalidRequest(f"the request has {len(data)} bytes; a cluster takes up to {MAX_MESSAGE_BYTES // 2}")
        TO_TARGET_WORKER.decode(data)
    except (MalformedMessage, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent to a worker: {error}") from None
