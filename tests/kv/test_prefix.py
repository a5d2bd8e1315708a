import random

import pytest

from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.prefix import block_key, chain_keys, root_key

IDS = [random.Random(1).randrange(150_000) for _ in range(4 * BLOCK_SIZE)]


def test_only_full_blocks_have_a_key() -> None:
    assert [len(chain_keys(IDS[:n], "")) for n in (0, 1, 15, 16, 17, 31, 32, 64)] == [0, 0, 0, 1, 1, 1, 2, 4]
    for size in (0, BLOCK_SIZE - 1, BLOCK_SIZE + 1):
        with pytest.raises(ValueError, match=f"holds {BLOCK_SIZE} tokens, got {size}"):
            block_key(root_key(""), IDS[:size])


def test_keys_of_a_prefix_are_a_prefix_of_the_keys() -> None:
    whole = chain_keys(IDS, "salt")
    assert len(set(whole)) == len(whole)
    for n in range(len(IDS) + 1):
        assert chain_keys(IDS[:n], "salt") == whole[: n // BLOCK_SIZE]


@pytest.mark.parametrize("position", [0, 15, 16, 40, 63])
def test_a_changed_token_changes_its_block_and_all_after_it(position: int) -> None:
    changed = [*IDS]
    changed[position] += 1
    same = [a == b for a, b in zip(chain_keys(IDS, ""), chain_keys(changed, ""), strict=True)]
    assert same == [block < position // BLOCK_SIZE for block in range(4)]


def test_equal_tokens_after_different_parents_differ() -> None:
    twice = IDS[:BLOCK_SIZE] * 2
    assert len(set(chain_keys(twice, ""))) == 2


def test_ids_beyond_a_byte_do_not_collide() -> None:
    low = [1] * BLOCK_SIZE
    assert len({block_key(root_key(""), [1 + 256 * k] * BLOCK_SIZE) for k in range(4)} | {block_key(b"", low)}) == 5


def test_salts_share_no_key() -> None:
    salts = ("", "a", "b", "a\0", "\ud800", "\ud801")  # JSON can carry half a surrogate pair
    chains = [chain_keys(IDS, salt) for salt in salts]
    assert len({key for chain in chains for key in chain}) == 4 * len(salts)


def test_keys_are_stable() -> None:
    """All processes compute the same keys: there is no per-process hash seed."""
    assert root_key("tenant").hex()[:16] == "7937503ede35a023"
    assert chain_keys(range(BLOCK_SIZE), "tenant")[0].hex()[:16] == "b816e954d5062c28"
