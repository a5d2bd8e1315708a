import pytest

from paceline.runtime.draft_worker.packed_branches import pack, unpack
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.messages import TO_TARGET, Ahead, Branch, Branches


def branches(records):
    return [branch for record in records for branch in unpack(record)]


@pytest.mark.parametrize("token", [0, 49_151, 65_535, 65_536, 2**31 - 1])
def test_what_is_packed_is_what_is_unpacked(token):
    told = [((0, 7), [1, token, 3]), ((64, token), [4, 5, 6]), ((2, 9), [])]
    records = pack(11, 5, told)
    assert all((record.sequence, record.round) == (11, 5) for record in records)
    assert branches(records) == [Branch(*key, tokens) for key, tokens in told]
    message = Branches(2**31, records)
    assert TO_TARGET.decode(TO_TARGET.encode(message)) == message


def test_nothing_to_tell_is_no_record():
    assert pack(1, 1, []) == []


def test_seven_tokens_of_a_common_vocabulary_take_seventeen_bytes():
    (record,) = pack(1, 1, [((3, 40_000), [50_000] * 7)])
    assert len(record.packed) == 17


def test_an_older_peers_are_taken_as_they_are():
    told = [Branch(1, 2, [3])]
    assert unpack(Ahead(1, 1, told)) is told


@pytest.mark.parametrize(("data", "length"), [(b"1234", 0), (b"x", 7), (b"1" * 18, 7)])
def test_what_is_no_number_of_branches_is_refused(data, length):
    with pytest.raises(Malformed):
        unpack(Ahead(1, 1, [], data, length))
