"""What a target and a draft worker say to each other. docs/protocol.md is the same in words.

Every message is a msgpack array: an integer tag, then the fields in order. A peer one version newer may append fields; an
older one leaves them out, and they take their defaults. Fields are never removed, reordered or given another meaning.
"""

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.runtime.wire.codec import Codec

VERSION = 3
OLDEST = 2
"""The oldest version spoken here. 2 knows no `Step.kept`, `Drafted.begun` and packed branches: such a peer is sent none."""

MAX_DEPTH = 64
MAX_BATCH = 1024
MAX_CONTEXT = 1 << 20
MAX_MESSAGE_BYTES = 8 << 20

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Large = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Depth = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]
Share = Annotated[float, Meta(ge=0.0)]
Text = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(max_length=256)]
Words = Annotated[str, Meta(max_length=65536)]
Salt = Annotated[str, Meta(max_length=4096)]
Tokens = Annotated[list[Token], Meta(max_length=MAX_CONTEXT)]
Chain = Annotated[list[Token], Meta(max_length=MAX_DEPTH)]
Sequences = Annotated[list[Large], Meta(max_length=MAX_BATCH)]
LawBytes = Annotated[bytes, Meta(max_length=MAX_DEPTH * 2048)]
BranchBytes = Annotated[bytes, Meta(max_length=1 << 16)]


class Record(msgspec.Struct, array_like=True, frozen=True):
    """A part of a message: an array without a tag."""


class Message(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A message: an array that begins with its tag."""


class Hello(Message, frozen=True, tag=1):
    """First from either side. The version spoken is the smaller `version`, if it is not below the larger `oldest`."""

    version: Count
    oldest: Count
    epoch: Large
    """New at every start of a process: what was said in another epoch is void."""
    vocabulary: Text
    """sha256 of the vocabulary; peers that differ have nothing to say to each other."""
    name: Text = ""
    max_sequences: Count = 0
    """A worker's: how many sequences it holds for all its peers together."""
    max_depth: Depth = MAX_DEPTH


class Sampling(Record, frozen=True):
    """Of `SamplingParams`, what shapes a distribution."""

    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[dict[Token, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=4096)] = (
        msgspec.field(default_factory=dict)
    )


class Rule(IntEnum):
    """How drafts will be verified: it decides how they are drawn."""

    COUPLED = 0
    REJECTION = 1


class Open(Message, frozen=True, tag=2):
    """A sequence and everything committed so far. Opening what is open starts it afresh. No answer, or `Busy`."""

    epoch: Large
    """The worker's, from its `Hello`; so in every message to it."""
    sequence: Large
    ids: Tokens
    num_prompt: Count
    sampling: Sampling
    seed: Large
    choice: Count = 0
    rule: Rule = Rule.COUPLED
    salt: Salt = ""


class Step(Record, frozen=True):
    """One sequence's turn."""

    sequence: Large
    round: Count
    """Grows with every turn of the sequence; the answer repeats it."""
    base: Count
    """Length of the sequence before `tokens`: it must be what the worker has."""
    tokens: Tokens
    """Committed since the last turn, after those in `kept`."""
    depth: Depth
    held: Depth = 0
    """Tokens of this round's draft that the sender has already, from `Branches`: the worker answers only what is missing."""
    kept: Depth = 0
    """So many tokens of the answer to the last round were committed first; the worker has them."""


class Advance(Message, frozen=True, tag=3):
    """All sequences of one target step. Each is answered by an item of some `Drafts`, in any order."""

    epoch: Large
    steps: Annotated[list[Step], Meta(max_length=MAX_BATCH)]
    ahead: bool = False
    """Send `Branches` as well: the network is slow enough for it to pay."""


class Close(Message, frozen=True, tag=4):
    """Forget these sequences. No answer; closing what is not open is no error."""

    epoch: Large
    sequences: Sequences


class Ping(Message, frozen=True, tag=5):
    """Answered by a `Pong` with the same nonce."""

    nonce: Large = 0


class Goodbye(Message, frozen=True, tag=6):
    """From a target: drop all I opened. From a worker: I am leaving, open elsewhere."""

    reason: Text = ""


class Drafted(Record, frozen=True):
    """A chain of drafted tokens that follows the committed ones of its round."""

    sequence: Large
    round: Count
    tokens: Chain
    laws: LawBytes = b""
    """Under rejection: what each token was drawn from, see `runtime/draft_worker/distributions.py`. Empty: one-hot."""
    ready: bool = False
    """It had been drafted before it was asked for."""
    begun: Annotated[list[Token], Meta(max_length=2 * MAX_BATCH)] = msgspec.field(default_factory=list)
    """Outcomes that are being drafted for next: accepted, the token that follows, accepted, token, …"""


class Load(Record, frozen=True):
    """How busy a worker is."""

    sequences: Count = 0
    waiting: Count = 0
    """Rounds that are being drafted."""
    pass_us: Count = 0
    """Microseconds that one pass over its model takes of late."""
    resting: Percent | None = None
    """It has stopped drafting ahead for this target, since so few of its drafts were ready. None: it drafts ahead."""


class Drafts(Message, frozen=True, tag=7):
    """Whatever became ready together."""

    epoch: Large
    """The worker's."""
    drafts: Annotated[list[Drafted], Meta(max_length=MAX_BATCH)]
    load: Load = Load()


class Branch(Record, frozen=True):
    """The draft for one outcome of a verification that is still under way."""

    accepted: Depth
    token: Token
    """What follows the accepted ones."""
    tokens: Chain
    """Empty: it is being drafted, and worth waiting for."""
    laws: LawBytes = b""


class Ahead(Record, frozen=True):
    """Branches of one sequence, for the verification of the draft of `round`."""

    sequence: Large
    round: Count
    branches: Annotated[list[Branch], Meta(max_length=MAX_BATCH)]
    """To a peer of version 2; empty where they are packed."""
    packed: BranchBytes = b""
    """Branches of `length` tokens each, see `runtime/draft_worker/packed_branches.py`."""
    length: Depth = 0
    is_wide: bool = False


class Branches(Message, frozen=True, tag=8):
    """Drafts sent before they are asked for. The outcome that comes true is used, at most once; the rest is dropped."""

    epoch: Large
    sequences: Annotated[list[Ahead], Meta(max_length=MAX_BATCH)]


class Busy(Message, frozen=True, tag=9):
    """These were not let in: no room. Open them elsewhere, or here after a while."""

    epoch: Large
    sequences: Sequences
    retry_ms: Count = 0
    load: Load = Load()


class Fault(IntEnum):
    MALFORMED = 1
    """That was no message."""
    VERSION = 2
    """No version in common."""
    VOCABULARY = 3
    """Another vocabulary."""
    STRANGER = 4
    """Say `Hello` first: the worker restarted, or dropped a peer that had been silent for too long."""
    EPOCH = 5
    """That was for another epoch: say `Hello` again."""
    UNKNOWN = 6
    """These sequences are not open here: `Open` them."""
    BASE = 7
    """These sequences are of another length here: `Open` them again."""


class Error(Message, frozen=True, tag=10):
    code: Fault
    message: Text
    sequences: Sequences = msgspec.field(default_factory=list)


class Pong(Message, frozen=True, tag=11):
    epoch: Large
    nonce: Large
    load: Load = Load()


FromTarget: TypeAlias = Hello | Open | Advance | Close | Ping | Goodbye
FromDraft: TypeAlias = Hello | Drafts | Branches | Busy | Error | Pong | Goodbye

TO_DRAFT_WORKER: Codec[FromTarget] = Codec(FromTarget)
TO_TARGET: Codec[FromDraft] = Codec(FromDraft)


def common_version(theirs: Hello, version: int = VERSION, oldest: int = OLDEST) -> int | None:
    """The version both speak, the newest; None if there is none."""
    newest = min(version, theirs.version)
    return newest if newest >= max(oldest, theirs.oldest) else None
