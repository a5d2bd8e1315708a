import msgspec
import pytest

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from paceline.wire.codec import MalformedMessage
from paceline.wire.kv_events import decode, encode, short_key

KEYS = [bytes([i]) * 32 for i in range(4)]


def decoded_batch(*events: CacheEvent) -> object:
    """The bytes on the wire as a generic msgpack decoder reads them."""
    return msgspec.msgpack.decode(encode(events, now=1.5))


def packed(batch: object) -> bytes:
    return msgspec.msgpack.encode(batch)


def test_stored_blocks_have_vllms_format() -> None:
    event = BlocksStored(KEYS[:2], None, list(range(32)), "red")
    assert decoded_batch(event) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [short_key(KEYS[0]), short_key(KEYS[1])],
                "parent_block_hash": None,
                "token_ids": list(range(32)),
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["red"], None],
                "group_idx": None,
            }
        ],
        0,
    ]


def test_removed_and_cleared_have_vllms_format() -> None:
    assert decoded_batch(BlocksRemoved([KEYS[1]], "host"), CacheCleared()) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [short_key(KEYS[1])], "medium": "CPU", "group_idx": None},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_events_decode_to_themselves() -> None:
    events = [
        CacheCleared(),
        BlocksStored([1, 2], None, list(range(32)), "red"),
        BlocksStored([3], 9, list(range(16)), tier="disk"),
        BlocksRemoved([1, 2], "host"),
    ]
    assert decode(encode(events)) == events
    assert decode(encode([])) == []


def test_consecutive_blocks_of_a_chain_become_one_event() -> None:
    blocks = [BlocksStored([i], i - 1 if i else None, [i] * 16, "s" if not i else "") for i in range(3)]
    joined = decode(encode([*blocks, BlocksStored([9], 1, [9] * 16), BlocksRemoved([9]), BlocksRemoved([2])]))
    assert joined == [
        BlocksStored([0, 1, 2], None, [0] * 16 + [1] * 16 + [2] * 16, "s"),
        BlocksStored([9], 1, [9] * 16),
        BlocksRemoved([9, 2]),
    ]


@pytest.mark.parametrize("rank", [[], [None], [3]])
def test_arrays_of_older_vllm_versions(rank: list[object]) -> None:
    stored = ["BlockStored", [11, b"x" * 32], 10, list(range(32)), 16, None]
    batch = [
        2.0,
        [stored, [*stored, "GPU"], ["BlockRemoved", [11]], ["BlockRemoved", [11], "CPU"], ["AllBlocksCleared"]],
        *rank,
    ]
    event = BlocksStored([11, b"x" * 32], 10, list(range(32)))
    assert decode(packed(batch)) == [event, event, BlocksRemoved([11]), BlocksRemoved([11], "host"), CacheCleared()]


def test_maps_without_optional_fields() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5] * 16,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "kv_cache_spec_kind": "full",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    expected = [BlocksStored([1], None, [5] * 16), BlocksRemoved([1])]
    assert decode(packed([0.1, [stored, removed], 0])) == expected
    assert decode(packed({"ts": 0.1, "events": [stored, removed]})) == expected


@pytest.mark.parametrize("medium", ["STORAGE", "DISK"])
def test_both_names_of_the_disk_tier(medium: str) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium, "locality": "REMOTE"}
    assert decode(packed([0.1, [removed]])) == [BlocksRemoved([1], "disk")]


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_id": 1},
        {"lora_name": "poet"},
        {"extra_keys": [["image", "salt"]]},
        {"extra_keys": [[["image", 3]]]},
        {"parent_block_hash": 4, "extra_keys": [["image"]]},
        {"medium": "TAPE"},
        {"group_idx": 1},
        {"block_hashes": []},
    ],
)
def test_blocks_that_no_prompt_can_hit_are_left_out(changes: dict[str, object]) -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5] * 16,
        "block_size": 16,
    }
    assert decode(packed({"ts": 0.0, "events": [stored | changes]})) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        packed("text"),
        packed([1.0]),
        packed([1.0, [["BlockStored", "no"]]]),
        packed([1.0, [["BlockStored", [1], None, [1 << 40] * 16, 16]]]),
        packed([1.0, [["BlockStored", [1], None, [-1] * 16, 16]]]),
        packed({"ts": 1.0, "events": [{"type": "BlockRemoved", "block_hashes": [None]}]}),
        encode([BlocksStored([1], None, [1] * 16)])[:-3],
    ],
)
def test_an_invalid_batch_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)
