import msgspec
import pytest

from paceline.wire.transfer_messages import ID_BYTES, MAX_PARTS, TransferHandle

ID = b"secret0123456789"


def encoded(*fields):
    return msgspec.msgpack.encode(fields)


def decode(data):
    return msgspec.msgpack.decode(data, type=TransferHandle)


def test_a_handle_decodes_to_itself_and_ignores_extra_fields():
    handle = TransferHandle(ID, {"socket": "tcp://127.0.0.1:1", "unknown": "address"}, [1, 0, 2**40], "k" * 40)
    assert decode(msgspec.msgpack.encode(handle)) == handle
    assert decode(encoded(ID, {"socket": "a"}, [1], "", "extra")) == TransferHandle(ID, {"socket": "a"}, [1])


def test_a_handle_is_small_and_its_repr_hides_the_id():
    handle = TransferHandle(ID, {"socket": "tcp://127.0.0.1:1"}, [4096] * 7680)
    assert len(msgspec.msgpack.encode(handle)) < 32_000
    assert "secret" not in repr(handle)
    assert "7680 parts" in repr(handle)


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
def test_an_invalid_handle_is_refused(fields):
    assert len(ID) == ID_BYTES
    with pytest.raises(msgspec.ValidationError):
        decode(encoded(*fields))
