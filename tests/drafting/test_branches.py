import pytest

from paceline.drafting.branches import BranchKey, pack, unpack
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import TO_TARGET, Branches, SequenceBranches


@pytest.mark.parametrize("token", [0, 49_151, 65_535, 65_536, 2**31 - 1])
def test_unpack_inverts_pack(token):
    branches = [
        (BranchKey(0, 7), [1, token, 3]),
        (BranchKey(64, token), [4, 5, 6]),
        (BranchKey(2, 9), []),
    ]
    records = pack(11, 5, branches)
    assert all((record.sequence, record.round) == (11, 5) for record in records)
    assert [branch for record in records for branch in unpack(record)] == branches
    message = Branches(2**31, records)
    assert TO_TARGET.decode(TO_TARGET.encode(message)) == message


def test_no_branches_need_no_record():
    assert pack(1, 1, []) == []


def test_seven_tokens_of_a_common_vocabulary_take_seventeen_bytes():
    (record,) = pack(1, 1, [(BranchKey(3, 40_000), [50_000] * 7)])
    assert len(record.packed) == 17


@pytest.mark.parametrize(("data", "length"), [(b"1234", 0), (b"x", 7), (b"1" * 18, 7)])
def test_bytes_of_a_wrong_length_are_rejected(data, length):
    with pytest.raises(MalformedMessage):
        unpack(SequenceBranches(1, 1, data, length))
