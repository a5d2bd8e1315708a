import random

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, Tier
from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_index import KvIndex
from paceline.wire.kv_events import CacheContents, decode, encode


def test_an_empty_cache_is_one_cleared_event() -> None:
    assert list(CacheContents().events()) == [CacheCleared()]


def test_chains_are_in_order_without_removed_blocks() -> None:
    contents = CacheContents()
    contents.apply(BlocksStored([1, 2, 3], None, list(range(48)), "red"))
    contents.apply(BlocksStored([8, 9], 2, list(range(32))))
    contents.apply(BlocksRemoved([3]))
    assert len(contents) == 4
    assert decode(encode(contents.events())) == [
        CacheCleared(),
        BlocksStored([1, 2, 8, 9], None, [*range(32), *range(32)], "red"),
    ]
    contents.apply(CacheCleared())
    assert len(contents) == 0


def test_an_index_built_from_the_contents_equals_one_built_from_all_events() -> None:
    rng = random.Random(4)
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    contents, complete, sums = CacheContents(), KvIndex(PrefixSums(seed=1)), PrefixSums(seed=1)
    prompts = [[start] * 32 + list(range(start, start + 64)) for start in range(4)]
    held: dict[Tier, set[tuple[int, ...]]] = {tier: set() for tier in tiers}
    for _ in range(600):
        ids, tier = rng.choice(prompts), rng.choice(tiers)
        i = rng.randrange(6)
        key, parent = tuple(ids[: 16 * (i + 1)]), tuple(ids[: 16 * i]) or None
        if rng.random() < 0.6:
            if parent is not None and not any(parent in keys for keys in held.values()):
                continue
            event: BlocksStored | BlocksRemoved = BlocksStored([key], parent, ids[16 * i : 16 * (i + 1)], "", tier)
            held[tier].add(key)
        else:
            event = BlocksRemoved([key], tier)
            held[tier].discard(key)
        contents.apply(event)
        complete.apply("a", event)
    late = KvIndex(sums)
    for event in contents.events():
        late.apply("a", event)
    assert late.num_orphans == 0
    for ids in prompts:
        assert late.match(ids).groups == complete.match(ids).groups
    assert any(complete.match(ids).groups for ids in prompts)
