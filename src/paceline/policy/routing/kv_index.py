"""Index of cached prefixes by worker and tier, built from KV events."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import repeat

from paceline.core.kv_events import TIERS, BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Tier
from paceline.core.sequence import BLOCK_SIZE
from paceline.policy.routing.prefix_tree import KEY_MASK, NONE, PrefixTree, members
from paceline.policy.routing.router import RoutedPrompt

Sums = Callable[[Sequence[int], int, int], Sequence[int]]
"""Function from tokens, the index of their first block and the number of the blocks before it to one number per full block. The
numbers are cumulative."""
MIN_PEER_TOKENS = 128
"""Tokens that a peer must hold beyond the chosen worker to be worth a fetch."""


@dataclass(frozen=True, slots=True)
class Match:
    """Cached prefix of a prompt on each worker. Workers are identified by their index numbers."""

    groups: Sequence[tuple[int, Sequence[int]]]
    """(tokens, workers that hold exactly these in any tier), most first. A worker is in at most one group."""
    lower: Mapping[int, tuple[int, ...]]
    """Tokens in each of `TIERS`, for workers that hold part of the prefix below the device."""
    chain: Sequence[int]
    """Prefix numbers of the prompt under its salt, one per block."""


@dataclass(slots=True)
class _Worker:
    number: int
    blocks: tuple[dict[Hashable, int], ...] = field(default_factory=lambda: tuple({} for _ in TIERS))
    """Key in the tree of the end of each block, by tier and the worker's own key."""
    long: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    """All keys in the tree of a block of more than 16 tokens, by the worker's own key."""
    holders: dict[int, int] = field(default_factory=dict)
    """Holder number in the tree, by tier. A holder has the blocks of its tier and of all nearer tiers. The device's number is
    the worker's number. The numbers of lower tiers are created with the first block of their tier."""


class KvIndex:
    """Events of a worker must arrive in order. Blocks whose parent is unknown are ignored and counted in `num_orphans`. Not
    thread-safe."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._tree = PrefixTree()
        self._workers: dict[str, _Worker] = {}
        self._holders: list[_Worker] = []
        self._lower_tiers = 0
        """Bits of the holders of tiers below the device."""
        self.num_orphans = 0
        """Blocks ignored because their parent is unknown."""

    def __len__(self) -> int:
        """Distinct blocks of all workers."""
        return len(self._tree)

    @property
    def num_holders(self) -> int:
        """Numbers of workers, and of their tiers below the device, so far."""
        return len(self._holders)

    def number(self, worker: str) -> int:
        """The worker's number in every `Match`; assigned on the first call."""
        return self._worker(worker).number

    def num_blocks(self, worker: str, tier: Tier | None = None) -> int:
        """Blocks of the worker in one tier, or in all."""
        known = self._workers.get(worker)
        if known is None:
            return 0
        return sum(map(len, known.blocks)) if tier is None else len(known.blocks[TIERS.index(tier)])

    def device_blocks(self, worker: str) -> Sized:
        """The worker's blocks on its device: their number is always the present one."""
        return self._worker(worker).blocks[0]

    def match(self, ids: Sequence[int], salt: str = "") -> Match:
        """The cached prefix of this prompt on each worker, under this salt."""
        chain = self._sums(ids, 0, _root(salt))
        found = self._tree.match(chain)
        if self._lower_tiers and any(holders & self._lower_tiers for _, holders in found):
            return Match(*self._tiered(found), chain)
        return Match([(blocks * BLOCK_SIZE, members(holders)) for blocks, holders in found], {}, chain)

    def apply(self, worker: str, event: CacheEvent) -> None:
        match event:
            case BlocksStored():
                self._store(self._worker(worker), event)
            case BlocksRemoved():
                self._remove(self._worker(worker), event.keys, TIERS.index(event.tier))
            case CacheCleared():
                self.clear(worker)

    def clear(self, worker: str) -> None:
        """Remove all blocks of the worker."""
        known = self._workers.get(worker)
        if known is not None:
            for tier, blocks in enumerate(known.blocks):
                self._remove(known, list(reversed(blocks)), tier)  # last first, so that no block loses its parent

    def _tiered(
        self, found: list[tuple[int, int]]
    ) -> tuple[Sequence[tuple[int, Sequence[int]]], Mapping[int, tuple[int, ...]]]:
        """`groups` and `lower` of a `Match`."""
        prefixes: dict[int, dict[int, int]] = {}
        for blocks, holders in found:
            for holder in members(holders):
                worker = self._holders[holder]
                tier = next(tier for tier, own in worker.holders.items() if own == holder)
                prefixes.setdefault(worker.number, {})[tier] = blocks * BLOCK_SIZE
        groups: dict[int, list[int]] = {}
        lower = {}
        for number, by_tier in prefixes.items():
            # A tier's prefix includes those of nearer tiers
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
            known.number = known.holders[0] = self._add_holder(known)
            self._workers[name] = known
        return known

    def _add_holder(self, worker: _Worker) -> int:
        self._holders.append(worker)
        return len(self._holders) - 1

    def _store(self, worker: _Worker, event: BlocksStored) -> None:
        keys, block_size = event.keys, event.block_size
        span, rest = divmod(block_size, BLOCK_SIZE)
        parent = self._find(worker, event.parent)
        if rest or not span or len(event.tokens) != len(keys) * block_size or parent is None:
            self.num_orphans += len(keys)
            return
        tier = TIERS.index(event.tier)
        if tier not in worker.holders:
            self._add_tier(worker, tier)
        start, before = (0, _root(event.salt)) if parent == NONE else (self._tree.depth(parent), parent)
        chain = self._sums(event.tokens, start, before)
        if span == 1 and len(worker.holders) == 1:
            held, holder = worker.blocks[0], 1 << worker.number
            if held.keys().isdisjoint(keys) and self._tree.has_none(holder, chain):
                size = len(held)
                held.update(zip(keys, chain, strict=True))
                if len(held) == size + len(keys):
                    self._tree.add(holder, parent, chain)
                    return
                for key in keys:  # one of them is there twice
                    held.pop(key, None)
        holders = [1 << holder for level, holder in worker.holders.items() if level >= tier]
        for i, key in enumerate(keys):
            own = chain[i * span : (i + 1) * span]
            if not self._is_free(worker, key, own, sum(holders)):
                self.num_orphans += len(keys) - i
                return
            for holder in holders:
                self._tree.add(holder, parent, own)
            worker.blocks[tier][key] = parent = own[-1]
            if span > 1:
                worker.long[key] = tuple(own)

    def _is_free(self, worker: _Worker, key: Hashable, own: Sequence[int], holders: int) -> bool:
        """Whether the key is new or has the same chain. A second key of a chain would outlive the nodes of the first."""
        for blocks in worker.blocks:
            if key in blocks:
                return self._chain(worker, key, blocks[key]) == tuple(own)
        return not any(self._tree.has(holders, block) for block in own)

    @staticmethod
    def _chain(worker: _Worker, key: Hashable, end: int) -> tuple[int, ...]:
        """Keys in the tree of a block of the worker."""
        return worker.long.get(key) or (end,)

    @staticmethod
    def _find(worker: _Worker, key: Hashable | None) -> int | None:
        """Key in the tree of a block's end; NONE for the start of a prompt, None for an unknown block."""
        if key is None:
            return NONE
        for blocks in worker.blocks:
            if key in blocks:
                return blocks[key]
        return None

    def _remove(self, worker: _Worker, keys: Sequence[Hashable], tier: int) -> None:
        held = worker.blocks[tier]
        if len(worker.holders) == 1 and not worker.long:
            size = len(held)
            ends = list(map(held.pop, keys, repeat(NONE)))
            if len(held) + len(ends) != size:
                ends = [end for end in ends if end != NONE]
            self._tree.drop(1 << worker.number, ends)
            return
        for key in keys:
            if key not in held:
                continue
            chain = self._chain(worker, key, held.pop(key))[::-1]
            for level, holder in worker.holders.items():
                if level >= tier and not any(key in nearer for nearer in worker.blocks[: level + 1]):
                    self._tree.drop(1 << holder, chain)
            if not any(key in blocks for blocks in worker.blocks):
                worker.long.pop(key, None)

    def _add_tier(self, worker: _Worker, tier: int) -> None:
        """Create the holder of a tier, with the blocks of all nearer tiers."""
        holder = worker.holders[tier] = self._add_holder(worker)
        self._lower_tiers |= 1 << holder
        for blocks in worker.blocks[:tier]:
            for key, end in blocks.items():
                chain = self._chain(worker, key, end)
                self._tree.add(1 << holder, self._tree.parent(chain[0]), chain)


def _root(salt: str) -> int:
    """Offset of the prefix numbers under a salt; 0 without one."""
    return hash(("paceline/salt", salt)) & KEY_MASK if salt else 0


@dataclass(frozen=True, slots=True)
class PeerHint:
    """A worker that holds more of a prompt than the worker that will serve it."""

    worker: str
    tokens: int
    """Leading prompt tokens on its device."""


def find_peer(index: KvIndex, prompt: RoutedPrompt, chosen: str, workers: Collection[str]) -> PeerHint | None:
    """The other worker with the longest prefix, if it is `MIN_PEER_TOKENS` longer than that of `chosen`.

    Only blocks on the peer's device count: loading and sending those of lower tiers is usually slower than computing them.
    """
    match = index.match(prompt.ids, prompt.salt)
    names = {index.number(name): name for name in workers}
    own, best = 0, PeerHint("", 0)
    for tokens, numbers in match.groups:
        for number in numbers:
            name = names.get(number)
            if name == chosen:
                own = tokens  # any tier: the worker loads them itself
            elif name is not None and (on_device := match.lower.get(number, (tokens,))[0]) > best.tokens:
                best = PeerHint(name, on_device)
    return best if best.tokens - own >= MIN_PEER_TOKENS else None
