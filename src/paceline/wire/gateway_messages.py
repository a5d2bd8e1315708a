"""Messages between gateways and target workers, and between a target worker and its prefill workers.

A connection can break at any message. Every submission has a number (`attempt`) and every output its first position (`start`):
the gateway ignores stale outputs, detects missing ones, and continues from the token ids that it has.
"""

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw

from paceline.core.errors import InvalidRequest
from paceline.core.output import TokenLogprobs
from paceline.core.request import Request, SpeculationFlags, ValidatedRequest
from paceline.core.sequence import FinishReason, Origin
from paceline.core.status import EngineStatus
from paceline.model_files import SystemFingerprint
from paceline.policy.routing.kv_index import PeerHint
from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.draft_messages import (
    MAX_CONTEXT,
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
    Token,
    Tokens,
)
from paceline.wire.transfer_messages import MemoryRegion, TransferHandle

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


class EncodedSubmit(Message, frozen=True, tag=20):
    """A `Submit` whose request is encoded already. It has the same bytes, and is received as a `Submit`."""

    epoch: Large
    attempt: Large
    request: Raw
    peer: PeerHint | None = None


class Cancel(Message, frozen=True, tag=21):
    """Stop these submissions and free their blocks. It has no answer."""

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
    """Public key. It is empty without encryption."""
    is_on_trial: bool = False
    """Whether a draft worker gets only a share of the sequences, see `policy/pairing/draft_trial.py`."""


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


class ChangeWeights(Message, frozen=True, tag=29):
    """Use other weights of the same architecture. The worker finishes its requests first, and its status reports the change. A
    worker that has made this change, or makes one, ignores the message."""

    number: Large
    """Number of this change, chosen by the gateway."""
    folder: LongText
    """Name or folder of the weights, on the machine of the worker. Empty if a peer sends them."""
    peer: LongText
    """Address of the weight server of another worker. Empty if they are in a folder."""
    seconds: NonNegative
    """Time for requests that run. Those that are not finished end."""


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
    | ChangeWeights
    | Goodbye
)

TO_TARGET_WORKER: Codec[FromGateway] = Codec(FromGateway)


def check_limits(request: Request) -> None:
    """Raise `InvalidRequest` if a field is longer than other messages of the protocol can carry."""
    for name, text, limit in (
        ("id", request.id, MAX_NAME),
        ("category", request.category, MAX_NAME),
        ("tenant", request.tenant, MAX_NAME),
        ("cache_salt", request.cache_salt, MAX_SALT),
        ("resume_key", request.resume_key, MAX_NAME),
        ("trace", request.trace, MAX_NAME),
    ):
        if len(text) > limit:
            raise InvalidRequest(f"{name} must have at most {limit} characters, got {len(text)}", field=name)


def check_size(request: ValidatedRequest) -> Raw:
    """The encoded request, for `EncodedSubmit`. Raises `InvalidRequest` if a worker could not decode it."""
    check_limits(request)
    try:
        encoded = Raw(TO_TARGET_WORKER.encode(request))
        data = TO_TARGET_WORKER.encode(EncodedSubmit(0, 0, encoded))
        # The second half is for the generated tokens, in case another worker continues the request
        if len(data) > MAX_MESSAGE_BYTES // 2:
            raise InvalidRequest(f"the request has {len(data)} bytes; a cluster takes up to {MAX_MESSAGE_BYTES // 2}")
        TO_TARGET_WORKER.decode(data)
    except (MalformedMessage, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent to a worker: {error}") from None
    return encoded


MAX_ATTEMPTS = 65536


class Welcome(Message, frozen=True, tag=40):
    """Answer to `Hello`: what the worker offers."""

    version: Count
    epoch: Large
    name: Name
    vocabulary: Name
    vocab_size: Count
    max_model_len: Count
    max_num_seqs: Count
    max_depth: Count
    methods: Annotated[list[Name], Meta(max_length=64)]
    default_method: Name
    events_port: Count = 0
    """Port of the KV events, on the worker's host. 0 if the worker publishes no KV events."""
    replay_port: Count = 0
    fingerprint: SystemFingerprint | None = None
    """What its texts depend on. None if it is not known. Workers with different fingerprints may generate different texts."""
    change: Large = 0
    """Number of the last change of its weights. 0 if it has those that it was started with."""
    memory: MemoryRegion | None = None
    """Device memory of its KV cache, by which a target learns whether it can map the cache. None if blocks are sent as
    bytes."""


class Output(Record, frozen=True):
    """A `StepOutput` of one submission, without its text: the gateway makes the text from the tokens."""

    attempt: Large
    choice: Count
    start: Count
    """Number of output tokens of the choice before these."""
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_CONTEXT)]
    origins: Annotated[tuple[Origin, ...], Meta(max_length=MAX_CONTEXT)]
    drafted: Count = 0
    accepted: Count = 0
    num_cached: Count = 0
    waited: NonNegative = 0.0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Outputs(Message, frozen=True, tag=41):
    """Outputs of one or more steps."""

    outputs: Annotated[list[Output], Meta(max_length=MAX_OUTPUTS)]


class FailureKind(Enum):
    INVALID = "invalid"
    """No worker accepts the request."""
    FAILED = "failed"
    """The engine failed on this request and continues without it. No other worker gets it."""
    CHANGED = "changed"
    """The worker's weights were changed before the request was finished."""
    LOST = "lost"
    """The worker cannot continue. Another worker may serve the request."""


class RequestFailed(Message, frozen=True, tag=42):
    """The submission ended without its last token."""

    attempt: Large
    kind: FailureKind
    message: LongText
    field: Name | None


class LoadProgress(Record, frozen=True):
    """Loaded part of a worker's model."""

    layers: Count
    total: Count
    peers: Count
    """Number of source peers. 0 means local disk."""
    in_place: Count = 0
    """Peers, of `peers`, whose device memory the worker copies."""


class Heartbeat(Message, frozen=True, tag=43):
    """Load of a target worker."""

    nonce: Large
    epoch: Large
    steps: Large
    is_busy: bool
    running: Count
    waiting: Count
    kv_used: Count
    kv_total: Count
    prompt_tokens: Count = 0
    """Prompt tokens that are not computed yet."""
    loading: LoadProgress | None = None
    """Load progress. None if the model is loaded. Requests received earlier wait for the layers that they need."""
    step_seconds: NonNegative | None = None
    """Longest time that the current step should take. None if no step of its size was measured yet."""
    attempts: Annotated[list[Large], Meta(max_length=MAX_ATTEMPTS)] = msgspec.field(default_factory=list)
    """Submissions of this gateway that the worker runs or has outputs of. The gateway continues all other submissions
    elsewhere."""
    is_draining: bool = False
    """Whether the worker takes no new submissions and exits soon. It reports the start of a drain at once, with nonce 0."""
    is_overloaded: bool = False
    """Whether the worker refuses new submissions because its memory is almost full."""


class StatusReport(Message, frozen=True, tag=44):
    """Answers `StatusRequest` with the worker's status, encoded as it is."""

    epoch: Large
    name: Name
    status: EngineStatus


class PrefillStarted(Message, frozen=True, tag=45):
    """Answer to `Prefill`. The parts (`engine/hooks/handoff.py`) become ready as they are computed."""

    attempt: Large
    handle: TransferHandle
    cache: Annotated[list[MemoryRegion], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    """Keys and values of every layer of the worker's cache, for `Prefill.in_place`. Parts then have the numbers of blocks."""


class TokensReply(Message, frozen=True, tag=46):
    """Answer to `TokensRequest`."""

    number: Large
    seed: Large | None
    """Seed of the stream. None if the worker does not know the key."""
    choices: Annotated[list[Tokens], Meta(max_length=MAX_OUTPUTS)]
    """Output tokens by choice."""


FromTargetWorker: TypeAlias = (
    Welcome | Outputs | RequestFailed | Heartbeat | StatusReport | PrefillStarted | TokensReply | Goodbye
)

TO_GATEWAY: Codec[FromTargetWorker] = Codec(FromTargetWorker)
