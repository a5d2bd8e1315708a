"""A prefix tree of cached blocks: returns for a prompt how many leading blocks each holder has.

A `Run` of the tree is a sequence of consecutive blocks of one chain that the same holders have.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress


class Run:
    """Chains that have all blocks of the run continue in one of its children, if they continue."""

    __slots__ = ("children", "holders", "keys", "orphans", "parent", "start")

    def __init__(self, keys: list[int], start: int, parent: "Run | None") -> None:
        self.keys, self.start, self.parent = keys, start, parent
        """`start` is the number of blocks before the first."""
        self.children: dict[int, Run] = {}
        """The runs that follow, by their first key."""
        self.holders = 0
        """The holders of every block up to the end of the run, as a bitmask."""
        self.orphans = 0
        """The holders of its blocks that lack a block before them, as a bitmask."""


def offset(run: Run, key: int) -> int:
    """Position of a block in its run. Most blocks that are asked for are the last or the first."""
    keys = run.keys
    if keys[-1] == key:
        return len(keys) - 1
    return keys.index(key)


def split(runs: dict[int, Run], run: Run, at: int) -> Run:
    """Divide the run before its block `at`; returns the first part. The smaller part becomes the new object."""
    keys, parent = run.keys, run.parent
    if 2 * at <= len(keys):
        first, rest = Run(keys[:at], run.start, parent), run
        rest.keys, rest.start, rest.parent = keys[at:], run.start + at, first
        if parent is not None:
            parent.children[keys[0]] = first
        moved = first
    else:
        first, rest = run, Run(keys[at:], run.start + at, run)
        rest.children, first.children = first.children, rest.children
        for child in rest.children.values():
            child.parent = rest
        del keys[at:]
        moved = rest
    first.children[rest.keys[0]] = rest
    moved.holders, moved.orphans = run.holders, run.orphans
    for key in moved.keys:
        runs[key] = moved
    return first


def merge(runs: dict[int, Run], run: Run) -> None:
    """Join the run with its only child, and with its parent whose only child it is, where they have the same holders."""
    if len(run.children) == 1:
        [child] = run.children.values()
        if child.holders == run.holders and child.orphans == run.orphans:
            run = _join(runs, run, child)
    parent = run.parent
    if (
        parent is not None
        and len(parent.children) == 1
        and parent.holders == run.holders
        and parent.orphans == run.orphans
    ):
        _join(runs, parent, run)


def _join(runs: dict[int, Run], first: Run, rest: Run) -> Run:
    if len(first.keys) >= len(rest.keys):
        for key in rest.keys:
            runs[key] = first
        first.keys += rest.keys
        first.children = rest.children
        for child in first.children.values():
            child.parent = first
        return first
    for key in first.keys:
        runs[key] = rest
    rest.keys = first.keys + rest.keys
    rest.start, rest.parent = first.start, first.parent
    if rest.parent is not None:
        rest.parent.children[rest.keys[0]] = rest
    return rest


def prune(runs: dict[int, Run], run: Run) -> None:
    """Take a run without blocks in `runs` out of the tree, and those before it that then have neither holders nor children."""
    parent = run.parent
    while parent is not None:
        del parent.children[run.keys[0]]
        if parent.holders or parent.orphans or parent.children:
            merge(runs, parent)
            return
        for key in parent.keys:
            del runs[key]
        run, parent = parent, parent.parent


KEY_MASK = (1 << 64) - 1
NONE = -1


class PrefixTree:
    """The key of a block identifies all tokens up to its end. Holders are bits of an int.

    Consecutive blocks with the same holders are one run, so that a chain which a worker stores or evicts at once costs
    one change of the tree. A holder counts at a block only while it has every block before it. So the set of holders shrinks
    along a chain: a lookup bisects for the last known block and follows the runs from there to the root.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        """Run of every block, by key. A block has all its predecessors in the tree."""
        self._orphaned = 0
        """Holders that ever had a block without one of its predecessors."""

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: int) -> bool:
        return key in self._runs

    def has(self, holders: int, key: int) -> bool:
        """Whether any of them has the block, with or without its predecessors."""
        run = self._runs.get(key)
        return run is not None and bool((run.holders | run.orphans) & holders)

    def has_none(self, holder: int, keys: Sequence[int]) -> bool:
        """Whether the holder has no block of this chain."""
        at, find = 0, self._runs.get
        while at < len(keys) and (run := find(keys[at])) is not None:
            if (run.holders | run.orphans) & holder:
                return False
            at += _num_common(run, offset(run, keys[at]), keys, at)
        return True

    def depth(self, key: int) -> int:
        """Number of blocks up to and including this one."""
        run = self._runs[key]
        return run.start + offset(run, key) + 1

    def parent(self, key: int) -> int:
        """Key of the block before, or NONE."""
        run = self._runs[key]
        at = offset(run, key)
        if at:
            return run.keys[at - 1]
        return run.parent.keys[-1] if run.parent is not None else NONE

    def add(self, holder: int, parent: int, keys: Sequence[int]) -> None:
        """Add `holder` (one bit) to the blocks `keys` after `parent` (NONE: the start of a prompt)."""
        before = None if parent == NONE else self._runs[parent]
        has_parent = before is None or bool(before.holders & holder)
        start = 0 if before is None else before.start + offset(before, parent) + 1
        at, count = 0, len(keys)
        while at < count:
            run = self._runs.get(keys[at])
            if run is None:  # so are all later ones
                self._add_new(holder, before, start, keys[at:] if at else keys, has_parent)
                return
            low = start - run.start
            common = _num_common(run, low, keys, at)
            if not run.holders & holder:
                run = self._isolate(run, low, low + common)
                if has_parent:
                    run.holders |= holder
                    if self._orphaned & holder:
                        self._reattach(holder, run)
                else:
                    run.orphans |= holder
                    self._orphaned |= holder
                merge(self._runs, run)
            at, start = at + common, start + common
            before = self._runs[keys[at - 1]]

    def drop(self, holder: int, keys: Sequence[int]) -> None:
        """Remove `holder` from blocks, in this order. Its later blocks do not match until the block is added again."""
        runs, at, count = self._runs, 0, len(keys)
        while at < count:
            run = runs[keys[at]]
            own = run.keys
            high = offset(run, keys[at]) + 1
            # Caches evict a chain from its end: take all of this run that is dropped in that order
            low = max(0, high - (count - at))
            end, dropped = at + high - low, own[low:high]
            dropped.reverse()
            if keys[at:end] != dropped:
                low, end = high - 1, at + 1
                while low and end < count and own[low - 1] == keys[end]:
                    low, end = low - 1, end + 1
            if run.holders | run.orphans == holder and high == len(own) and not run.children:
                for key in keys[at:end]:
                    del runs[key]
                if low:
                    del own[low:]
                else:
                    prune(runs, run)
            else:
                self._drop_part(holder, run, low, high)
            at = end

    def match(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(blocks, holders that have exactly these leading blocks) of the chain, most first."""
        runs = self._runs
        low, high = 0, len(keys)
        run: Run | None = None
        while low < high:  # the last block of the chain in the tree
            middle = (low + high + 1) // 2
            known = runs.get(keys[middle - 1])
            if known is None:
                high = middle - 1
            else:
                low, run = middle, known
        found, counted = [], 0
        while run is not None:
            more = run.holders & ~counted
            if more:
                found.append((low, more))
                counted |= more
            low, run = run.start, run.parent
        return found

    def _add_new(self, holder: int, before: Run | None, start: int, keys: Sequence[int], has_parent: bool) -> None:
        """Blocks with new keys after the first `start` ones, the last of which is in `before`."""
        runs = self._runs
        if before is not None:
            if start < before.start + len(before.keys):
                before = split(runs, before, start - before.start)
            elif has_parent and not before.children and before.holders == holder and not before.orphans:
                before.keys += keys
                for key in keys:
                    runs[key] = before
                return
        run = Run(list(keys), start, before)
        if has_parent:
            run.holders = holder
        else:
            run.orphans = holder
            self._orphaned |= holder
        if before is not None:
            before.children[keys[0]] = run
        for key in keys:
            runs[key] = run

    def _isolate(self, run: Run, low: int, high: int) -> Run:
        """A run of exactly these blocks of the run."""
        if high < len(run.keys):
            run = split(self._runs, run, high)
        if low:
            child_key = run.keys[low]
            split(self._runs, run, low)
            run = self._runs[child_key]
        return run

    def _drop_part(self, holder: int, run: Run, low: int, high: int) -> None:
        run = self._isolate(run, low, high)
        if run.holders & holder:
            run.holders &= ~holder
            pending = [run]
            while pending:
                for child in pending.pop().children.values():
                    if child.holders & holder:
                        child.holders &= ~holder
                        child.orphans |= holder
                        self._orphaned |= holder
                        pending.append(child)
        else:
            run.orphans &= ~holder
        if run.holders or run.orphans or run.children:
            merge(self._runs, run)
        else:
            for key in run.keys:
                del self._runs[key]
            prune(self._runs, run)

    def _reattach(self, holder: int, run: Run) -> None:
        """The holder has all blocks up to the end of the run: its blocks after it match again."""
        run.orphans &= ~holder
        pending = [run]
        while pending:
            for child in pending.pop().children.values():
                if child.orphans & holder:
                    child.orphans &= ~holder
                    child.holders |= holder
                    pending.append(child)


def _num_common(run: Run, low: int, keys: Sequence[int], at: int) -> int:
    """Blocks in common of the run from `low` on and of the chain from `at` on, at least one. Keys are equal only if the whole
    prefix is, so bisection finds the last."""
    own = run.keys
    least, most = 1, min(len(own) - low, len(keys) - at)
    if own[low + most - 1] == keys[at + most - 1]:
        return most
    while least < most:
        middle = (least + most + 1) // 2
        if own[low + middle - 1] == keys[at + middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least


_BIT = bytes(digit == ord("1") for digit in range(256))


@lru_cache(maxsize=4096)
def members(holders: int) -> tuple[int, ...]:
    """Indices of the set bits."""
    if holders & (holders - 1) == 0:
        return (holders.bit_length() - 1,) if holders else ()
    digits = f"{holders:b}".encode().translate(_BIT)
    return tuple(compress(range(len(digits)), reversed(digits)))
