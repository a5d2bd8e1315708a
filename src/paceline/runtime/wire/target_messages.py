"""Messages that a target worker sends: to gateways, and as a prefill worker to other targets."""

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.core.output import TokenLogprobs
from paceline.core.sequence import FinishReason, Origin
from paceline.core.status.engine import EngineStatus
from paceline.runtime.transfer.messages import MemoryRegion, TransferHandle
from paceline.runtime.wire.codec import Codec
from paceline.runtime.wire.messages import (
    MAX_CONTEXT,
    MAX_OUTPUTS,
    Count,
    Goodbye,
    Large,
    LongText,
    Message,
    Name,
    NonNegative,
    Record,
    Token,
    Tokens,
)

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
    weights: Name = ""
    """Checksum of the weights and the formats that they are computed in. Empty if it is not known. Workers with different
    checksums generate different texts."""
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


class StatusReport(Message, frozen=True, tag=44):
    """Answers `StatusRequest` with the worker's status, encoded as it is."""

    epoch: Large
    name: Name
    status: EngineStatus


class PrefillStarted(Message, frozen=True, tag=45):
    """Answer to `Prefill`. The parts (`engine/hooks/handoff_plan.py`) become ready as they are computed."""

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
