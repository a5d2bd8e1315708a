"""Messages between target workers and draft workers, and the parts that all protocols share. See docs/protocol.md.

A message is a msgpack array: an integer tag, then the fields in order. Core dataclasses inside a message are msgpack maps.
"""

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.core.request import SamplingParams, Verification
from paceline.model_files.tokenizer import Fingerprint
from paceline.wire.codec import Codec

VERSION = 9
"""Protocol version. Two processes of different versions do not work together."""

MAX_DEPTH = 64
MAX_BATCH = 1024
MAX_CONTEXT = 1 << 20
MAX_OUTPUTS = 4096
MAX_MESSAGE_BYTES = 8 << 20
MAX_NAME = 256
MAX_SALT = 4096

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Large = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Depth = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]
NonNegative = Annotated[float, Meta(ge=0.0)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
LongText = Annotated[str, Meta(max_length=65536)]
Salt = Annotated[str, Meta(max_length=MAX_SALT)]
Tokens = Annotated[list[Token], Meta(max_length=MAX_CONTEXT)]
Chain = Annotated[list[Token], Meta(max_length=MAX_DEPTH)]
Sequences = Annotated[list[Large], Meta(max_length=MAX_BATCH)]
DistributionBytes = Annotated[bytes, Meta(max_length=MAX_DEPTH * 2048)]
BranchBytes = Annotated[bytes, Meta(max_length=1 << 16)]


class Record(msgspec.Struct, array_like=True, frozen=True):
    """A part of a message: an array without a tag."""


class Message(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A message: an array that begins with its tag."""


class Hello(Message, frozen=True, tag=1):
    """First message of either side."""

    version: Count
    epoch: Large
    """Random number of the process. A receiver ignores messages of another epoch."""
    tokenizer: Fingerprint | None
    """Checksums of tokenizer and chat template; the vocabulary must be the same for both sides. It is None from a gateway."""
    name: Name = ""
    max_sequences: Count = 0
    """Sequences that a draft worker holds for all targets together."""
    max_depth: Depth = MAX_DEPTH


class Open(Message, frozen=True, tag=2):
    """A sequence and all its committed tokens. An open sequence starts again. It is answered by nothing, or by `Busy`."""

    epoch: Large
    """Epoch of the draft worker, from its `Hello`. It is the same in every message to the worker."""
    sequence: Large
    ids: Tokens
    num_prompt: Count
    sampling: SamplingParams
    seed: Large
    choice: Count = 0
    rule: Verification = "coupled"
    salt: Salt = ""


class RoundRequest(Record, frozen=True):
    """Request for the next draft of one sequence."""

    sequence: Large
    round: Count
    """Number of the round, higher than all before it. The answer repeats it."""
    base: Count
    """Length of the sequence before the newly committed tokens. It must equal the worker's length."""
    tokens: Tokens
    """Tokens committed since the last round, after the first `num_kept` tokens of its draft."""
    depth: Depth
    num_held: Depth = 0
    """Tokens of this round's draft that the target already has, from `Branches`. The worker sends the draft only if longer."""
    num_kept: Depth = 0
    """Tokens of the answer to the last round that were committed first. The worker has them."""
    num_alternatives: Depth = 0
    """Alternatives to drafted tokens that the target verifies in the same step as the draft."""


class Advance(Message, frozen=True, tag=3):
    """All rounds of one target step. Each is answered by an item of a `Drafts`, in any order."""

    epoch: Large
    rounds: Annotated[list[RoundRequest], Meta(max_length=MAX_BATCH)]
    send_ahead: bool = False
    """Whether the target requests `Branches`, because the round trip is long enough."""


class Close(Message, frozen=True, tag=4):
    """Drop these sequences. No answer; unknown sequences are ignored."""

    epoch: Large
    sequences: Sequences


class Ping(Message, frozen=True, tag=5):
    """Answered by a `Pong` with the same nonce."""

    nonce: Large = 0


class Goodbye(Message, frozen=True, tag=6):
    """The sender leaves. A worker drops the sequences of a target that leaves. A target opens the sequences of a worker that
    leaves at another worker."""

    reason: Name = ""


class RoundDraft(Record, frozen=True):
    """A chain of drafted tokens that follows the committed tokens of its round."""

    sequence: Large
    round: Count
    tokens: Chain
    distributions: DistributionBytes = b""
    """The distribution of each token under rejection, see `drafting/branches.py`. Empty if the distributions
    are one-hot."""
    was_ready: bool = False
    """Whether the worker had drafted it before the request."""
    started: Annotated[list[Token], Meta(max_length=2 * MAX_BATCH)] = msgspec.field(default_factory=list)
    """Outcomes for which the worker drafts next: accepted, following token, accepted, following token, …"""
    alternatives: Annotated[list[Token], Meta(max_length=2 * MAX_DEPTH)] = msgspec.field(default_factory=list)
    """Tokens that the target may choose instead of drafted ones, most likely first, as many as requested or fewer: the number
    of drafted tokens before it, the token, …"""


class Load(Record, frozen=True):
    """Load of a draft worker."""

    sequences: Count = 0
    waiting: Count = 0
    """Rounds that are being drafted."""
    pass_us: Count = 0
    """Recent time of one pass over its model, microseconds."""
    paused_hit_percent: Percent | None = None
    """Percentage of drafts that were ready when the worker paused drafting ahead for this target. None if it drafts ahead."""


class Drafts(Message, frozen=True, tag=7):
    """Drafts that are complete."""

    epoch: Large
    """Epoch of the draft worker."""
    drafts: Annotated[list[RoundDraft], Meta(max_length=MAX_BATCH)]
    load: Load = Load()


class SequenceBranches(Record, frozen=True):
    """Branches of one sequence, for the verification of the draft of `round`."""

    sequence: Large
    round: Count
    packed: BranchBytes
    """Branches of `length` tokens each, see `drafting/branches.py`."""
    length: Depth
    is_wide: bool = False


class Branches(Message, frozen=True, tag=8):
    """Drafts sent before they are requested. The target uses the branch of the actual outcome, at most once."""

    epoch: Large
    sequences: Annotated[list[SequenceBranches], Meta(max_length=MAX_BATCH)]


class Busy(Message, frozen=True, tag=9):
    """These sequences were not opened: no room. Open them at another worker, or here after `retry_ms`."""

    epoch: Large
    sequences: Sequences
    retry_ms: Count = 0
    load: Load = Load()


class ErrorCode(IntEnum):
    MALFORMED = 1
    """The bytes were not a message."""
    VERSION = 2
    """The protocol versions differ."""
    TOKENIZER = 3
    """The vocabularies differ."""
    NO_HELLO = 4
    """`Hello` is missing: the worker restarted, or dropped a target that was silent for too long."""
    EPOCH = 5
    """The message was for another epoch: send `Hello` again."""
    UNKNOWN_SEQUENCE = 6
    """These sequences are not open here: `Open` them."""
    LENGTH = 7
    """These sequences have another length here: `Open` them again."""


class Error(Message, frozen=True, tag=10):
    code: ErrorCode
    message: Name
    sequences: Sequences = msgspec.field(default_factory=list)


class Pong(Message, frozen=True, tag=11):
    epoch: Large
    nonce: Large
    load: Load = Load()


FromTarget: TypeAlias = Hello | Open | Advance | Close | Ping | Goodbye
FromDraft: TypeAlias = Hello | Drafts | Branches | Busy | Error | Pong | Goodbye

TO_DRAFT_WORKER: Codec[FromTarget] = Codec(FromTarget)
TO_TARGET: Codec[FromDraft] = Codec(FromDraft)
