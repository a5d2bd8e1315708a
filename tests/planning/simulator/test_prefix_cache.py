import random
from collections import OrderedDict

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from paceline.planning.simulator.prefix_cache import PrefixCache, PromptBlocks

BLOCK = 16


class BlockByBlock:
    """Reference: one entry per block, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.capacity, self.used = capacity, 0

    def cached(self, chain: tuple[int, ...]) -> int:
        count = next((i for i, key in enumerate(chain) if key not in self.blocks), len(chain))
        for key in reversed(chain[:count]):
            self.blocks.move_to_end(key)
        return count * BLOCK

    def store(self, chain: tuple[int, ...]) -> None:
        for key in reversed(chain):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        self.evict()

    def reserve(self, tokens: int) -> None:
        self.used += tokens
        if tokens > 0:
            self.evict()

    def evict(self) -> None:
        while self.blocks and len(self.blocks) > max(0, self.capacity - self.used) // BLOCK:
            self.blocks.popitem(last=False)


def test_holds_the_blocks_of_a_list_by_last_use() -> None:
    dice, announced, numbers = random.Random(3), set[object](), dict[tuple[int, ...], int]()

    def publish(event: CacheEvent) -> None:
        if isinstance(event, BlocksStored):
            assert announced.isdisjoint(event.keys)
            assert event.parent is None or event.parent in announced
            announced.update(event.keys)
        elif isinstance(event, BlocksRemoved):
            assert announced.issuperset(event.keys)
            announced.difference_update(event.keys)

    cache, plain = PrefixCache(40 * BLOCK, BLOCK, publish), BlockByBlock(40 * BLOCK)
    prompt = PromptBlocks((), 0)
    for _ in range(2000):
        steps = tuple(dice.randrange(3) for _ in range(dice.randrange(1, 12)))
        chain = tuple(numbers.setdefault(steps[: i + 1], len(numbers) + 1) for i in range(len(steps)))
        prompt = PromptBlocks(chain, len(chain) * BLOCK)
        match dice.randrange(4):
            case 0:
                assert cache.held(prompt) == cache.cached(prompt) == plain.cached(chain)
            case 1 | 2:
                cache.store(prompt)
                plain.store(chain)
            case 3:
                tokens = dice.randrange(-plain.used, 640) if plain.used < 500 else -plain.used
                cache.reserve(tokens)
                plain.reserve(tokens)
        assert announced == plain.blocks.keys()
        assert len(cache) == len(announced)
    cache.clear()
    assert (len(cache), cache.held(prompt)) == (0, 0)
