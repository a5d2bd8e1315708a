import random
from collections.abc import Sequence

import pytest

from paceline.core.kv_events import TIERS, BlocksRemoved, BlocksStored, CacheCleared, Tier
from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_index import MIN_PEER_TOKENS, KvIndex, PeerHint, find_peer
from paceline.policy.routing.router import RoutedPrompt

PROMPT = list(range(100, 100 + 10 * BLOCK_SIZE))
IDS = list(range(640))
WORKERS = ("a", "b", "c")


@pytest.fixture
def index() -> KvIndex:
    return KvIndex(PrefixSums(seed=1))


def stored(
    ids: Sequence[int], first: int = 0, salt: str = "", tier: Tier = "device", size: int = BLOCK_SIZE
) -> BlocksStored:
    """Blocks of `ids` from number `first` on; the keys are their numbers after the salt."""
    last = len(ids) // size
    keys = [f"{salt}{i}" for i in range(first, last)]
    parent = f"{salt}{first - 1}" if first else None
    return BlocksStored(keys, parent, ids[first * size : last * size], salt, tier, size)


def prefixes(index: KvIndex, names: Sequence[str], ids: Sequence[int] = PROMPT, salt: str = "") -> dict[str, int]:
    lengths = {number: tokens for tokens, numbers in index.match(ids, salt).groups for number in numbers}
    return {name: lengths[index.number(name)] for name in names if index.number(name) in lengths}


def test_match_returns_the_cached_prefix_of_each_worker(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT))
    index.apply("b", stored(PROMPT[:64]))
    index.apply("c", stored(PROMPT[16:]))  # the same blocks, elsewhere in a prompt
    assert prefixes(index, "abc") == {"a": 160, "b": 64}
    assert prefixes(index, "abc", PROMPT[:40]) == {"a": 32, "b": 32}  # whole blocks only
    assert [tokens for tokens, _ in index.match(PROMPT).groups] == [160, 64]


def test_chains_grow_and_shrink(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT[:48]))
    index.apply("a", stored(PROMPT, first=3))
    assert prefixes(index, "a") == {"a": 160}
    index.apply("a", BlocksRemoved(["9", "8"]))
    index.apply("a", BlocksRemoved(["9", "never"]))
    assert prefixes(index, "a") == {"a": 128}


def test_blocks_after_an_unknown_block_are_ignored(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT, first=3))
    assert prefixes(index, "a") == {}
    assert index.num_orphans == 7
    index.apply("a", stored(PROMPT))
    assert prefixes(index, "a") == {"a": 160}


def test_clear_removes_the_blocks_of_one_worker(index: KvIndex) -> None:
    for name in "ab":
        index.apply(name, stored(PROMPT))
    index.apply("a", CacheCleared())
    assert prefixes(index, "ab") == {"b": 160}
    assert index.num_blocks("a") == 0
    assert index.num_blocks("b") == 10
    index.apply("b", CacheCleared())
    assert len(index) == 0


def test_worker_number_is_stable(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT))
    number = index.number("a")
    index.apply("b", stored(PROMPT[:32]))
    index.clear("a")
    index.clear("never there")
    assert index.number("a") == number != index.number("b")


def test_salts_are_isolated(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT, salt="red"))
    index.apply("b", stored(PROMPT[:32]))
    assert prefixes(index, "ab", salt="red") == {"a": 160}
    assert prefixes(index, "ab", salt="blue") == {}
    assert prefixes(index, "ab") == {"b": 32}


def test_larger_blocks_are_split(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT, size=64))
    index.apply("b", stored(PROMPT))
    assert prefixes(index, "ab") == {"a": 128, "b": 160}
    index.apply("a", BlocksRemoved(["1"]))
    assert prefixes(index, "ab") == {"a": 64, "b": 160}
    index.clear("b")
    index.apply("a", BlocksRemoved(["0"]))
    assert len(index) == 0


@pytest.mark.parametrize(
    "event",
    [
        BlocksStored(["x"], None, PROMPT[:24], block_size=24),
        BlocksStored(["x"], None, PROMPT[:10]),
        BlocksStored(["x"], None, [], block_size=0),
    ],
)
def test_blocks_of_incompatible_size_are_ignored(index: KvIndex, event: BlocksStored) -> None:
    index.apply("a", event)
    assert len(index) == 0
    assert index.num_orphans == 1


def test_repeated_event_counts_once(index: KvIndex) -> None:
    for _ in range(2):
        index.apply("a", stored(PROMPT))
    index.apply("a", stored(PROMPT[:64]))
    assert prefixes(index, "a") == {"a": 160}
    index.apply("a", BlocksRemoved(["9"]))
    assert prefixes(index, "a") == {"a": 144}
    index.clear("a")
    assert len(index) == 0


def test_second_key_of_a_chain_is_ignored(index: KvIndex) -> None:
    """A server may salt its keys without reporting the salt. Removing one key must not leave the other with freed nodes."""
    index.apply("a", stored(PROMPT))
    index.apply("a", BlocksStored([f"twin {i}" for i in range(10)], None, PROMPT))
    assert index.num_orphans == 10
    index.apply("a", BlocksRemoved([f"{i}" for i in reversed(range(10))]))
    index.apply("a", BlocksRemoved([f"twin {i}" for i in reversed(range(10))]))
    assert len(index) == 0


def test_invalid_events_are_removed_with_the_worker(index: KvIndex) -> None:
    """Invalid events (keys that move, follow themselves or repeat) are removed with the worker."""
    generator = random.Random(8)
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    for _ in range(2000):
        keys = [generator.randrange(12) for _ in range(generator.randint(1, 3))]
        ids = [generator.randrange(2) for _ in range(BLOCK_SIZE)] * len(keys)
        parent, name, tier = generator.choice([None, *range(12)]), generator.choice("abc"), generator.choice(tiers)
        if generator.random() < 0.7:
            index.apply(name, BlocksStored(keys, parent, ids, "", tier))
        else:
            index.apply(name, BlocksRemoved(keys, tier))
    assert len(index) > 0
    for name in "abc":
        index.clear(name)
    assert len(index) == 0


def test_tiers(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT[:64]))
    index.apply("a", stored(PROMPT[:96], tier="host"))
    index.apply("a", stored(PROMPT, tier="disk"))
    index.apply("b", stored(PROMPT[:32]))
    match = index.match(PROMPT)
    assert prefixes(index, "ab") == {"a": 160, "b": 32}
    assert match.lower == {index.number("a"): (64, 32, 64)}
    assert [index.num_blocks("a", tier) for tier in TIERS] == [4, 6, 10]
    assert (index.num_blocks("a"), index.num_blocks("unknown", "host")) == (20, 0)


def test_block_moved_to_a_lower_tier_still_matches(index: KvIndex) -> None:
    index.apply("a", stored(PROMPT))
    last = BlocksStored(["8", "9"], "7", PROMPT[128:], tier="host")
    index.apply("a", last)
    assert index.match(PROMPT).lower == {}  # it is in both tiers, and the device's copy is used
    index.apply("a", BlocksRemoved(["9", "8"]))
    assert prefixes(index, "a") == {"a": 160}
    assert index.match(PROMPT).lower == {index.number("a"): (128, 32, 0)}
    index.apply("a", BlocksRemoved(["9", "8"], "host"))
    assert prefixes(index, "a") == {"a": 128}
    index.clear("a")
    assert len(index) == 0


def test_tiers_against_sets() -> None:
    """Random events in all tiers, compared with plain sets."""
    generator = random.Random(3)
    index = KvIndex(PrefixSums(seed=2))
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    has: dict[str, dict[Tier, set[int]]] = {name: {tier: set() for tier in tiers} for name in "abc"}
    for _ in range(1500):
        name, tier, block = generator.choice("abc"), generator.choice(tiers), generator.randrange(10)
        mine = has[name]
        if generator.random() < 0.6:
            if block and not any(block - 1 in held for held in mine.values()):
                continue
            ids = PROMPT[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            index.apply(name, BlocksStored([block], block - 1 if block else None, ids, tier=tier))
            mine[tier].add(block)
        else:
            index.apply(name, BlocksRemoved([block], tier))
            mine[tier].discard(block)
        match = index.match(PROMPT)
        expected, lower = {}, {}
        for name, held in has.items():
            ends = []
            union: set[int] = set()
            for tier in tiers:
                union |= held[tier]
                ends.append(next(i for i in range(11) if i not in union) * BLOCK_SIZE)
            if ends[-1]:
                expected[name] = ends[-1]
            if ends[-1] > ends[0]:
                lower[index.number(name)] = (ends[0], ends[1] - ends[0], ends[2] - ends[1])
        assert prefixes(index, "abc") == expected
        assert match.lower == lower


def peer_index(**held: int) -> KvIndex:
    """An index with the given tokens of the prompt on the device of each worker."""
    made = KvIndex(PrefixSums(1))
    for worker, tokens in held.items():
        store(made, worker, 0, tokens)
    return made


def store(index: KvIndex, worker: str, start: int, end: int, tier: Tier = "device", salt: str = "") -> None:
    keys = [f"{i}" for i in range(start // 16, end // 16)]
    parent = f"{start // 16 - 1}" if start else None
    index.apply(worker, BlocksStored(keys, parent, IDS[start:end], salt, tier))


def test_find_peer_returns_the_longest_prefix() -> None:
    assert find_peer(peer_index(a=0, b=320, c=480), RoutedPrompt(IDS), "a", WORKERS) == PeerHint("c", 480)
    assert find_peer(peer_index(a=160, b=320), RoutedPrompt(IDS), "a", WORKERS) == PeerHint("b", 320)


def test_find_peer_needs_a_minimum_gain() -> None:
    assert find_peer(peer_index(a=320, b=320), RoutedPrompt(IDS), "a", WORKERS) is None
    assert find_peer(peer_index(a=320, b=320 + MIN_PEER_TOKENS - 16), RoutedPrompt(IDS), "a", WORKERS) is None
    assert find_peer(peer_index(a=320, b=320 + MIN_PEER_TOKENS), RoutedPrompt(IDS), "a", WORKERS) == PeerHint(
        "b", 320 + MIN_PEER_TOKENS
    )
    assert find_peer(peer_index(a=640), RoutedPrompt(IDS), "a", WORKERS) is None


def test_find_peer_considers_usable_workers_only() -> None:
    assert find_peer(peer_index(b=320, c=480), RoutedPrompt(IDS), "a", ("a", "b")) == PeerHint("b", 320)


def test_find_peer_ignores_lower_tiers_of_peers() -> None:
    made = peer_index(a=160, b=320)
    store(made, "a", 160, 640, "disk")
    assert find_peer(made, RoutedPrompt(IDS), "a", WORKERS) is None
    made = peer_index(b=160)
    store(made, "b", 160, 640, "host")
    assert find_peer(made, RoutedPrompt(IDS), "a", WORKERS) == PeerHint("b", 160)


def test_find_peer_respects_the_salt() -> None:
    made = KvIndex(PrefixSums(1))
    store(made, "b", 0, 640, salt="alice")
    assert find_peer(made, RoutedPrompt(IDS, "bob"), "a", WORKERS) is None
    assert find_peer(made, RoutedPrompt(IDS, "alice"), "a", WORKERS) == PeerHint("b", 640)
