import random

import msgspec
import pytest

from paceline.core.request import SamplingParams
from paceline.model_files.tokenizer.compatibility import Fingerprint
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import (
    MAX_DEPTH,
    TO_DRAFT_WORKER,
    TO_TARGET,
    VERSION,
    Advance,
    Drafts,
    Hello,
    Open,
    RoundDraft,
    RoundRequest,
)

TOKENIZER = Fingerprint("vocabulary", "merges", "special", "stop", None)
HELLO = Hello(VERSION, 5, TOKENIZER, "t", 0)
OPEN = Open(
    5, 7, [1, 2, 3], 2, SamplingParams(temperature=0.7, top_k=5, logit_bias={3: 1.5}), 2**62, 1, "rejection", "salt"
)
ADVANCE = Advance(5, [RoundRequest(7, 1, 3, [4, 70_000], 7)], True)
DRAFTS = Drafts(5, [RoundDraft(7, 1, [9, 8], b"q", True)])


@pytest.mark.parametrize("message", [HELLO, OPEN, ADVANCE])
def test_decode_inverts_encode(message):
    assert TO_DRAFT_WORKER.decode(TO_DRAFT_WORKER.encode(message)) == message


def test_directions_are_not_mixed():
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(TO_TARGET.encode(DRAFTS))
    with pytest.raises(MalformedMessage):
        TO_TARGET.decode(TO_DRAFT_WORKER.encode(ADVANCE))


def test_hello_of_a_later_version_is_decoded():
    """The version is the first field, so that a peer of another version can be told so."""
    fields = msgspec.msgpack.decode(TO_DRAFT_WORKER.encode(HELLO))
    fields[1] = VERSION + 1
    hello = TO_DRAFT_WORKER.decode(msgspec.msgpack.encode([*fields, "new field"]))
    assert isinstance(hello, Hello)
    assert hello.version == VERSION + 1


def changed_sampling(**values):
    """`OPEN` with sampling parameters that `SamplingParams` itself would not accept."""
    fields = msgspec.msgpack.decode(TO_DRAFT_WORKER.encode(OPEN), strict=False)
    fields[5] |= values
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": float("nan")},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"logit_bias": {1: 1e9}},
        {"seed": -1},
        {"stop": 5},
    ],
)
def test_invalid_sampling_parameters_are_malformed(values):
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(changed_sampling(**values))


@pytest.mark.parametrize(
    "bad",
    [
        Advance(5, [RoundRequest(7, 1, 3, [-1], 7)]),
        Advance(5, [RoundRequest(7, 1, 3, [2**31], 7)]),
        Advance(5, [RoundRequest(7, 1, 3, [1], MAX_DEPTH + 1)]),
        Advance(5, [RoundRequest(7, 1, 3, [1], 1, num_alternatives=MAX_DEPTH + 1)]),
        Advance(5, [RoundRequest(7, 1, 3, [1], 1)] * 1025),
        Advance(-1, []),
        Open(5, 7, [1], 1, SamplingParams(), 1, salt="x" * 5000),
        Open(5, 7, [1], 1, SamplingParams(), 1, rule="other"),
        Hello(1, 1, None, "x" * 257),
    ],
)
def test_every_field_has_a_limit(bad):
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(TO_DRAFT_WORKER.encode(bad))


@pytest.mark.parametrize(
    "bad",
    [
        Drafts(5, [RoundDraft(7, 1, [1] * (MAX_DEPTH + 1))]),
        Drafts(5, [RoundDraft(7, 1, [1], b"x" * (MAX_DEPTH * 2048 + 1))]),
        Drafts(5, [RoundDraft(7, 1, [1], alternatives=[1] * (2 * MAX_DEPTH + 1))]),
        RoundDraft(7, 1, [1]),
    ],
)
def test_drafts_have_limits(bad):
    with pytest.raises(MalformedMessage):
        TO_TARGET.decode(TO_TARGET.encode(bad))


def test_random_bytes_raise_nothing_but_malformed_message():
    rng = random.Random(0)
    valid = [TO_DRAFT_WORKER.encode(message) for message in (HELLO, OPEN, ADVANCE)]
    num_malformed = 0
    for _ in range(5000):
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            TO_DRAFT_WORKER.decode(bytes(data[: rng.randint(0, len(data))]))
        except MalformedMessage:
            num_malformed += 1
    assert num_malformed > 3000
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(b"\x91" * 100_000)  # nested deeper than the stack allows
