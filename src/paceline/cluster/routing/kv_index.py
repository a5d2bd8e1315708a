"""How long a prefix of a prompt each worker has, and in which tier, from what the workers say about their caches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.cluster.routing.prefix_tree import KEY_MASK, NONE, PrefixTree, members
from paceline.core.kv_events import TIERS, BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Tier

BLOCK_SIZE = 16
Sums = Callable[[Sequence[int], int], Sequence[int]]
"""For tokens that begin at the given block of a prompt, one number for each full block; numbers add up along a prompt."""


@dataclass(frozen=True, slots=True)
class Match:
    """Who has how much of a prompt's beginning. Workers go by their numbers in the index."""

    groups: Sequence[tuple[int, Sequence[int]]]
    """(tokens, the workers that have so many, in any tier), most first; a worker is in one group, or has nothing."""
    lower: Mapping[int, tuple[int, ...]]
    """Of workers that have some of it elsewhere than on the device: how many tokens in each of `TIERS`."""
    chain: Sequence[int]
    """A number for each of its prefixes, block by block."""
    root: int
    """What its salt adds to them."""


@dataclass(slots=True)
class _Worker:
    number: int
    blocks: tuple[dict[Hashable, tuple[int, ...]], ...] = field(default_factory=lambda: tuple({} for _ in TIERS))
    """By tier and the worker's own key: the nodes that block is, one for each 16 of its tokens."""
    slots: dict[int, int] = field(default_factory=dict)
    """By tier, a holder of the tree: it has what is in that tier or a nearer one. The device's is the worker's number;
    the others are there once something was stored in theirs."""


class KvIndex:
    """Events of a worker must come in order. What was missed is not known, and blocks that follow it are left out, and counted
    in `num_orphans`, until they are told again. Not thread-safe."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._tree = PrefixTree()
        self._workers: dict[str, _Worker] = {}
        self._slots: list[_Worker] = []
        self._lower = 0
        """Holders that stand for a tier below the device."""
        self.num_orphans = 0

    def __len__(self) -> int:
        """Different blocks that anybody has."""
        return len(self._tree)

    def number(self, worker: str) -> int:
        """The worker's in every `Match`; it gets one here if it has none."""
        return self._worker(worker).number

    def num_blocks(self, worker: str, tier: Tier | None = None) -> int:
        """Of that worker, in that tier or in all."""
        known = self._workers.get(worker)
        if known is None:
            return 0
        return sum(map(len, known.blocks)) if tier is None else len(known.blocks[TIERS.index(tier)])

    def match(self, ids: Sequence[int], salt: str = "") -> Match:
        """What there is for this prompt under this salt."""
        chain, root = self._sums(ids, 0), _root(salt)
        found = self._tree.match(chain, root)
        if self._lower and any(holders & self._lower for _, holders in found):
            return Match(*self._tiered(found), chain, root)
        return Match([(blocks * BLOCK_SIZE, members(holders)) for blocks, holders in found], {}, chain, root)

    def apply(self, worker: str, event: CacheEvent) -> None:
        match event:
            case BlocksStored():
                self._store(self._worker(worker), event)
            case BlocksRemoved():
                self._remove(self._worker(worker), event.keys, TIERS.index(event.tier))
            case CacheCleared():
                self.clear(worker)

    def clear(self, worker: str) -> None:
        """It has nothing, or nothing is known of what it has."""
        known = self._workers.get(worker)
        if known is not None:
            for tier, blocks in enumerate(known.blocks):
                self._remove(known, list(reversed(blocks)), tier)  # last first: nothing is broken off on the way

    def _tiered(
        self, found: list[tuple[int, int]]
    ) -> tuple[Sequence[tuple[int, Sequence[int]]], Mapping[int, tuple[int, ...]]]:
        """`groups` and `lower` of a `Match`."""
        reach: dict[int, dict[int, int]] = {}
        for blocks, holders in found:
            for slot in members(holders):
                worker = self._slots[slot]
                tier = next(tier for tier, own in worker.slots.items() if own == slot)
                reach.setdefault(worker.number, {})[tier] = blocks * BLOCK_SIZE
        groups: dict[int, list[int]] = {}
        lower = {}
        for number, by_tier in reach.items():
            # A tier's reach includes the nearer ones'
            ends = [
                max((by_tier.get(nearer, 0) for nearer in range(tier + 1)), default=0) for tier in range(len(TIERS))
            ]
            groups.setdefault(ends[-1], []).append(number)
            if ends[-1] > ends[0]:
                lower[number] = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
        return sorted(groups.items(), reverse=True), lower

    def _worker(self, name: str) -> _Worker:
        known = self._workers.get(name)
        if known is None:
            known = _Worker(NONE)
            known.number = known.slots[0] = self._slot(known)
            self._workers[name] = known
        return known

    def _slot(self, worker: _Worker) -> int:
        self._slots.append(worker)
        return len(self._slots) - 1

    def _store(self, worker: _Worker, event: BlocksStored) -> None:
        span, rest = divmod(event.block_size, BLOCK_SIZE)
        parent = self._find(worker, event.parent)
        if rest or not span or len(event.tokens) != len(event.keys) * event.block_size or parent is None:
            self.num_orphans += len(event.keys)
            return
        tier = TIERS.index(event.tier)
        if tier not in worker.slots:
            self._open_tier(worker, tier)
        holders = [1 << slot for level, slot in worker.slots.items() if level >= tier]
        start, base = (0, _root(event.salt)) if parent == NONE else (self._tree.depth(parent), self._tree.key(parent))
        chain = [(base + number) & KEY_MASK for number in self._sums(event.tokens, start)]
        for i, key in enumerate(event.keys):
            own = chain[i * span : (i + 1) * span]
            if not self._is_free(worker, key, own, sum(holders)):
                self.num_orphans += len(event.keys) - i
                return
            for holder in holders:
                nodes = self._tree.add(holder, parent, own)
            worker.blocks[tier][key], parent = tuple(nodes), nodes[-1]

    def _is_free(self, worker: _Worker, key: Hashable, own: Sequence[int], holders: int) -> bool:
        """A key stands for one chain, and a chain of a worker has one key: a second would outlive the nodes of the first."""
        nodes = tuple(map(self._tree.find, own))
        for blocks in worker.blocks:
            if key in blocks:
                return blocks[key] == nodes
        return not any(node != NONE and self._tree.has(holders, node) for node in nodes)

    @staticmethod
    def _find(worker: _Worker, key: Hashable | None) -> int | None:
        """The last node of a block that the worker has, NONE for the beginning of a prompt, None for one it does not have."""
        if key is None:
            return NONE
        return next((blocks[key][-1] for blocks in worker.blocks if key in blocks), None)

    def _remove(self, worker: _Worker, keys: Sequence[Hashable], tier: int) -> None:
        for key in keys:
            nodes = worker.blocks[tier].pop(key, ())
            for level, slot in worker.slots.items():
                if level >= tier and not any(key in nearer for nearer in worker.blocks[: level + 1]):
                    for node in reversed(nodes):
                        self._tree.drop(1 << slot, node)

    def _open_tier(self, worker: _Worker, tier: int) -> None:
        """What is in nearer tiers counts there too."""
        slot = worker.slots[tier] = self._slot(worker)
        self._lower |= 1 << slot
        for blocks in worker.blocks[:tier]:
            for nodes in blocks.values():
                self._tree.add(1 << slot, self._tree.parent(nodes[0]), map(self._tree.key, nodes))


def _root(salt: str) -> int:
    return hash(("paceline/salt", salt)) & KEY_MASK
