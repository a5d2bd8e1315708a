import random

from paceline.cluster.routing.kv_index import KvIndex
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, Tier
from paceline.kv.prefix_sums import PrefixSums
from paceline.runtime.kv_events.catalog import KvCatalog
from paceline.runtime.kv_events.events import decode, encode


def test_an_empty_cache_is_a_clearing() -> None:
    assert list(KvCatalog().events()) == [CacheCleared()]


def test_chains_are_told_in_order_and_what_is_gone_is_not() -> None:
    catalog = KvCatalog()
    catalog.apply(BlocksStored([1, 2, 3], None, list(range(48)), "red"))
    catalog.apply(BlocksStored([8, 9], 2, list(range(32))))
    catalog.apply(BlocksRemoved([3]))
    assert len(catalog) == 4
    assert decode(encode(catalog.events())) == [
        CacheCleared(),
        BlocksStored([1, 2, 8, 9], None, [*range(32), *range(32)], "red"),
    ]
    catalog.apply(CacheCleared())
    assert len(catalog) == 0


def test_who_comes_late_knows_as_much() -> None:
    """Two indices: one heard everything, the other the catalogue."""
    generator = random.Random(4)
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    catalog, heard, sums = KvCatalog(), KvIndex(PrefixSums(seed=1)), PrefixSums(seed=1)
    prompts = [[start] * 32 + list(range(start, start + 64)) for start in range(4)]
    held: dict[Tier, set[tuple[int, ...]]] = {tier: set() for tier in tiers}
    for _ in range(600):
        ids, tier = generator.choice(prompts), generator.choice(tiers)
        i = generator.randrange(6)
        key, parent = tuple(ids[: 16 * (i + 1)]), tuple(ids[: 16 * i]) or None
        if generator.random() < 0.6:
            if parent is not None and not any(parent in those for those in held.values()):
                continue
            event: BlocksStored | BlocksRemoved = BlocksStored([key], parent, ids[16 * i : 16 * (i + 1)], "", tier)
            held[tier].add(key)
        else:
            event = BlocksRemoved([key], tier)
            held[tier].discard(key)
        catalog.apply(event)
        heard.apply("a", event)
    late = KvIndex(sums)
    for event in catalog.events():
        late.apply("a", event)
    assert late.num_orphans == 0
    for ids in prompts:
        assert late.match(ids).groups == heard.match(ids).groups
    assert any(heard.match(ids).groups for ids in prompts)
