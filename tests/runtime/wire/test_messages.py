import random

import msgspec
import pytest

from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import (
    MAX_DEPTH,
    OLDEST,
    TO_DRAFT_WORKER,
    TO_TARGET,
    VERSION,
    Advance,
    Branch,
    Drafts,
    Hello,
    Open,
    RoundDraft,
    RoundRequest,
    Rule,
    Sampling,
    common_version,
)

HELLO = Hello(VERSION, OLDEST, 5, "sum", "t", 0)
OPEN = Open(5, 7, [1, 2, 3], 2, Sampling(0.7, 5, logit_bias={3: 1.5}), 2**62, 1, Rule.REJECTION, "salt")
ADVANCE = Advance(5, [RoundRequest(7, 1, 3, [4, 70_000], 7)], True)
DRAFTS = Drafts(5, [RoundDraft(7, 1, [9, 8], b"law", True)])


@pytest.mark.parametrize("message", [HELLO, OPEN, ADVANCE])
def test_what_is_sent_is_what_arrives(message):
    assert TO_DRAFT_WORKER.decode(TO_DRAFT_WORKER.encode(message)) == message


def test_directions_are_not_mixed():
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(TO_TARGET.encode(DRAFTS))
    with pytest.raises(MalformedMessage):
        TO_TARGET.decode(TO_DRAFT_WORKER.encode(ADVANCE))


def test_a_newer_peer_may_append_fields_everywhere():
    plain = msgspec.msgpack.decode(TO_DRAFT_WORKER.encode(ADVANCE))
    plain[2][0].append("new in a step")
    plain.append({"new": "in the message"})
    assert TO_DRAFT_WORKER.decode(msgspec.msgpack.encode(plain)) == ADVANCE


def test_an_older_peer_leaves_out_what_it_does_not_know():
    """Version 2 has no `kept` in RoundRequest."""
    plain = msgspec.msgpack.decode(TO_DRAFT_WORKER.encode(ADVANCE))
    plain[2][0] = plain[2][0][:6]
    old = TO_DRAFT_WORKER.decode(msgspec.msgpack.encode(plain))
    assert old == Advance(5, [RoundRequest(7, 1, 3, [4, 70_000], 7, held=0, kept=0)], ahead=True)


@pytest.mark.parametrize(
    ("theirs", "oldest", "common"),
    [(3, 2, 3), (2, 2, 2), (2, 1, 2), (4, 3, 3), (4, 2, 3), (5, 4, None), (1, 1, None)],
)
def test_peers_one_version_apart_find_a_common_one(theirs, oldest, common):
    assert common_version(Hello(theirs, oldest, 1, "")) == common


@pytest.mark.parametrize(
    "bad",
    [
        Advance(5, [RoundRequest(7, 1, 3, [-1], 7)]),
        Advance(5, [RoundRequest(7, 1, 3, [2**31], 7)]),
        Advance(5, [RoundRequest(7, 1, 3, [1], MAX_DEPTH + 1)]),
        Advance(5, [RoundRequest(7, 1, 3, [1], 1)] * 1025),
        Advance(-1, []),
        Open(5, 7, [1], 1, Sampling(temperature=float("nan")), 1),
        Open(5, 7, [1], 1, Sampling(temperature=-0.1), 1),
        Open(5, 7, [1], 1, Sampling(top_p=0.0), 1),
        Open(5, 7, [1], 1, Sampling(logit_bias={1: 1e9}), 1),
        Open(5, 7, [1], 1, Sampling(), 1, salt="x" * 5000),
        Open(5, 7, [1], 1, Sampling(), 1, rule=7),
        Hello(1, 1, 1, "x" * 257),
    ],
)
def test_every_field_has_a_limit(bad):
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(TO_DRAFT_WORKER.encode(bad))


def test_a_chain_is_no_longer_than_the_deepest_round():
    for bad in (
        Drafts(5, [RoundDraft(7, 1, [1] * (MAX_DEPTH + 1))]),
        Drafts(5, [RoundDraft(7, 1, [1], b"x" * (MAX_DEPTH * 2048 + 1))]),
        Branch(0, 1, [1]),
    ):
        with pytest.raises(MalformedMessage):
            TO_TARGET.decode(TO_TARGET.encode(bad))


def test_noise_is_malformed_and_nothing_worse():
    rng = random.Random(0)
    whole = [TO_DRAFT_WORKER.encode(message) for message in (HELLO, OPEN, ADVANCE)]
    refused = 0
    for _ in range(5000):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            TO_DRAFT_WORKER.decode(bytes(data[: rng.randint(0, len(data))]))
        except MalformedMessage:
            refused += 1
    assert refused > 3000
    with pytest.raises(MalformedMessage):
        TO_DRAFT_WORKER.decode(b"\x91" * 100_000)  # nested beyond any stack
