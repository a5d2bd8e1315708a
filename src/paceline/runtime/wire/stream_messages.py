"""What a gateway and a target worker say to each other: the same framing and `Hello` as between targets and drafts.

A gateway may lose a worker, and a worker a gateway, at any word. Every submission has a number of its own (`attempt`) and every
output says where it begins (`start`): what is stale is dropped, what is missing is noticed, and either way the gateway goes on
from the token ids it has.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.wire.codec import Codec
from paceline.runtime.wire.messages import (
    Count,
    Goodbye,
    Hello,
    Large,
    Message,
    Name,
    Record,
    Salt,
    Share,
    Token,
    Tokens,
    Words,
)
from paceline.runtime.wire.report_messages import Report

MAX_OUTPUTS = 4096
MAX_WORKERS = 4096


class WireSampling(Record, frozen=True):
    """All of `SamplingParams`."""

    max_tokens: Count
    temperature: float
    top_k: Count
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Annotated[dict[Token, float], Meta(max_length=4096)]
    seed: Large
    n: Annotated[int, Meta(ge=1, le=128)]
    stop: Annotated[list[Words], Meta(max_length=64)]
    stop_token_ids: Annotated[list[Token], Meta(max_length=4096)]
    ignore_eos: bool
    logprobs: Count | None
    json_schema: Annotated[str, Meta(max_length=1 << 20)] | None
    """JSON."""


class WireSpeculation(Record, frozen=True):
    """All of `SpeculationParams`."""

    enabled: bool
    method: Name | None
    max_depth: Count | None
    verification: Name | None


class Submit(Message, frozen=True, tag=20):
    """Generate. Answered by `Outputs` until every choice is finished, or by `Refused`."""

    epoch: Large
    """The worker's, from its `Welcome`."""
    attempt: Large
    prompt_ids: Tokens
    sampling: WireSampling
    speculation: WireSpeculation
    category: Name
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)]
    salt: Salt
    committed: Annotated[list[Tokens | None], Meta(max_length=128)]
    """See `Request.committed`."""
    trace: Annotated[str, Meta(max_length=64)] = ""
    """W3C `traceparent`; empty: it is not traced."""
    peer: Name = ""
    """Another target that has the first `peer_tokens` of the prompt in its cache; a worker of an earlier version does not read
    so far."""
    peer_tokens: Count = 0


class Withdraw(Message, frozen=True, tag=21):
    """Stop these and free what they hold. No answer."""

    attempts: Annotated[list[Large], Meta(max_length=MAX_OUTPUTS)]


class Beat(Message, frozen=True, tag=22):
    """Answered by a `Pulse`. A gateway that stays silent is taken for dead, and its streams are dropped."""

    nonce: Large


class Change(Message, frozen=True, tag=23):
    """Speculate like this from now on: `SpeculationFlags`."""

    enabled: bool | None
    method: Name | None
    max_depth: Count | None


class Drafters(Message, frozen=True, tag=24):
    """These are the draft workers there are."""

    workers: Annotated[list["DrafterAddress"], Meta(max_length=MAX_WORKERS)]
    prefillers: Annotated[list["DrafterAddress"], Meta(max_length=MAX_WORKERS)] = msgspec.field(default_factory=list)
    """The prefill workers there are; a target of an earlier version does not read so far, and computes prompts itself."""
    peers: Annotated[list["DrafterAddress"], Meta(max_length=MAX_WORKERS)] = msgspec.field(default_factory=list)
    """The target workers there are, where they give each other what they have cached."""


class DrafterAddress(Record, frozen=True):
    name: Name
    address: Name
    key: Name = ""
    """Its public key; empty without encryption."""


class Ask(Message, frozen=True, tag=25):
    """Answered by a `Report`."""


class Prefill(Message, frozen=True, tag=26):
    """From a target to a prefill worker: compute these tokens and hand over what comes of them, from block `first` on, and the
    hidden states of the last `state_rows` tokens. Answered by `Granted` or `Refused`; ended by `Withdraw`, or when the one who
    asked is silent."""

    epoch: Large
    """The prefill worker's, from its `Welcome`."""
    attempt: Large
    ids: Tokens
    """Whole blocks."""
    salt: Salt
    first: Count
    layout: Name
    """How the asker's cache is laid out: another one's bytes would mean something else."""
    state_layers: Annotated[list[Count], Meta(max_length=64)]
    state_rows: Count


class Welcome(Message, frozen=True, tag=40):
    """Answers `Hello`: what this worker offers."""

    version: Count
    oldest: Count
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
    """Where it publishes what is in its cache (`kv_publisher.py`), on the host it was found at; 0: it does not."""
    replay_port: Count = 0


class WireLogprobs(Record, frozen=True):
    token: Token
    logprob: float
    top: list[tuple[Token, float]]


class Output(Record, frozen=True):
    """One `StepOutput`."""

    attempt: Large
    choice: Count
    start: Count
    """Output tokens of the choice before these."""
    tokens: Tokens
    origins: Annotated[list[Count], Meta(max_length=4096)]
    """Indices into `Origin`, in the order it lists them."""
    text: Words
    drafted: Count
    accepted: Count
    num_cached: Count
    logprobs: list[WireLogprobs] | None
    finish_reason: Name | None
    method: Name = ""
    waited: Share = 0.0
    """Seconds from its arrival until it had a seat."""


class Outputs(Message, frozen=True, tag=41):
    """What became ready together."""

    outputs: Annotated[list[Output], Meta(max_length=MAX_OUTPUTS)]


class Refused(Message, frozen=True, tag=42):
    """This submission ended without its last token."""

    attempt: Large
    invalid: bool
    """Whether the request itself is at fault; otherwise another worker may well serve it."""
    message: Words
    field: Name | None


class Loading(Record, frozen=True):
    """How much of a worker's model is there."""

    layers: Count
    total: Count
    peers: Count
    """That they come from; 0: from disk."""


class Pulse(Message, frozen=True, tag=43):
    nonce: Large
    epoch: Large
    steps: Large
    busy: bool
    running: Count
    waiting: Count
    kv_used: Count
    kv_total: Count
    prompt_tokens: Count = 0
    """Of prompts, yet to be computed."""
    loading: Loading | None = None
    """None: all of it is there. Until then requests are taken, and wait for the layers they get to."""


class Granted(Message, frozen=True, tag=45):
    """Answers `Prefill`. The parts are those of `engine/hooks/handoff_plan.py`, and become ready as they are computed."""

    attempt: Large
    ticket: Ticket


FromGateway: TypeAlias = Hello | Submit | Withdraw | Beat | Change | Drafters | Ask | Prefill | Goodbye
FromTargetWorker: TypeAlias = Welcome | Outputs | Refused | Pulse | Report | Granted | Goodbye

TO_TARGET_WORKER: Codec[FromGateway] = Codec(FromGateway)
TO_GATEWAY: Codec[FromTargetWorker] = Codec(FromTargetWorker)
