import msgspec
import pytest

from paceline.runtime.transfer.handle import ID_BYTES, MAX_PARTS, Ticket

ID = b"secret0123456789"


def encoded(*fields):
    return msgspec.msgpack.encode(fields)


def decode(data):
    return msgspec.msgpack.decode(data, type=Ticket)


def test_there_and_back_and_a_newer_peer_may_say_more():
    ticket = Ticket(ID, {"socket": "tcp://127.0.0.1:1", "pigeon": "roof"}, [1, 0, 2**40], "k" * 40)
    assert decode(msgspec.msgpack.encode(ticket)) == ticket
    assert decode(encoded(ID, {"socket": "a"}, [1], "", "later")) == Ticket(ID, {"socket": "a"}, [1])


def test_it_is_small_and_keeps_its_secret():
    ticket = Ticket(ID, {"socket": "tcp://127.0.0.1:1"}, [4096] * 7680)
    assert len(msgspec.msgpack.encode(ticket)) < 32_000
    assert "secret" not in repr(ticket)
    assert "7680 parts" in repr(ticket)


@pytest.mark.parametrize(
    "fields",
    [
        (ID[:-1], {"socket": "a"}, [1]),
        (ID + b"x", {"socket": "a"}, [1]),
        (ID, {}, [1]),
        (ID, {str(i): "a" for i in range(9)}, [1]),
        (ID, {"socket": "a" * 257}, [1]),
        (ID, {"k" * 17: "a"}, [1]),
        (ID, {"socket": "a"}, []),
        (ID, {"socket": "a"}, [0] * (MAX_PARTS + 1)),
        (ID, {"socket": "a"}, [-1]),
        (ID, {"socket": "a"}, [2**40 + 1]),
        (ID, {"socket": "a"}, [1], "k" * 41),
    ],
)
def test_what_is_no_ticket_is_refused(fields):
    assert len(ID) == ID_BYTES
    with pytest.raises(msgspec.ValidationError):
        decode(encoded(*fields))
