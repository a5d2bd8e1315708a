"""A prefix tree of cached blocks: returns for a prompt how many leading blocks each holder has."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from typing import overload

KEY_MASK = (1 << 64) - 1
NONE = -1


class PrefixTree:
    """Nodes are numbered blocks; the key of a block identifies all tokens up to its end. Holders are bits of an int.

    A holder counts at a node only while it has every block before it. So the set of holders shrinks along a chain, and a
    lookup bisects the chain instead of walking it. Arrays instead of node objects keep a million blocks out of garbage
    collection.
    """

    def __init__(self) -> None:
        self._node_of: dict[int, int] = {}
        self._keys = array("Q")
        self._depths = array("l")
        self._parents = array("l")
        self._first = array("l")
        self._next = array("l")
        self._previous = array("l")
        self._holders: list[int] = []
        self._orphaned: dict[int, int] = {}
        """Holders of a block that lack one of its predecessors, by node."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._node_of)

    def find(self, key: int) -> int:
        """The node of a key, or NONE."""
        return self._node_of.get(key, NONE)

    def has(self, holders: int, node: int) -> bool:
        """Whether any of them has the block, with or without its predecessors."""
        return bool((self._holders[node] | self._orphaned.get(node, 0)) & holders)

    def key(self, node: int) -> int:
        return self._keys[node]

    def depth(self, node: int) -> int:
        """Number of blocks up to and including this one."""
        return self._depths[node]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def add(self, holder: int, parent: int, keys: Iterable[int]) -> list[int]:
        """Add `holder` (one bit) to the blocks `keys` after `parent` (NONE: the start of a prompt); returns their nodes."""
        keys = list(keys)
        nodes: list[int] = []
        find, holders, orphaned = self._node_of.get, self._holders, self._orphaned
        has_parent = parent == NONE or bool(holders[parent] & holder)
        for i, key in enumerate(keys):
            node = find(key, NONE)
            if node == NONE:  # so are all later ones: a node has all its predecessors
                return nodes + self._add_new(holder, parent, keys[i:], has_parent)
            if has_parent:
                holders[node] |= holder
                if orphaned:
                    self._reattach(holder, node)
            else:
                orphaned[node] = orphaned.get(node, 0) | holder
            nodes.append(node)
            parent = node
        return nodes

    def drop(self, holder: int, node: int) -> None:
        """Remove `holder` from the block. Its later blocks do not match until the block is added again."""
        if not self._holders[node] & holder:
            self._remove_orphan(holder, node)
        elif self._first[node] == NONE:
            self._holders[node] &= ~holder
        else:
            self._detach(holder, node)
        self._prune(node)

    def drop_all(self, holder: int, nodes: Iterable[int]) -> None:
        """`drop` for each, in this order."""
        holders, first, after, parents, keys = self._holders, self._first, self._next, self._parents, self._keys
        for node in nodes:
            if holders[node] != holder or first[node] != NONE or after[node] != NONE or node in self._orphaned:
                self.drop(holder, node)
                continue
            # A leaf of one holder, and the last sibling: most nodes are
            parent, before = parents[node], self._previous[node]
            holders[node] = 0
            if before != NONE:
                after[before], self._previous[node] = NONE, NONE
            elif parent != NONE:
                first[parent] = NONE
                if not holders[parent]:
                    self._prune(parent)
            del self._node_of[keys[node]]
            self._free.append(node)

    def match(self, sums: Sequence[int], root: int) -> list[tuple[int, int]]:
        """(blocks, holders that have exactly these leading blocks) of the chain with keys `sums[i] + root`, most first."""
        node_of, holders = self._node_of, self._holders
        low, high = 0, len(sums)
        while low < high:  # the deepest node of the chain
            middle = (low + high + 1) // 2
            if (sums[middle - 1] + root) & KEY_MASK in node_of:
                low = middle
            else:
                high = middle - 1
        if not low:
            return []
        end = holders[node_of[(sums[low - 1] + root) & KEY_MASK]]
        found = [(low, end)] if end else []
        spans = [(1, holders[node_of[(sums[0] + root) & KEY_MASK]], low, end)]
        while spans:
            start, some, stop, fewer = spans.pop()
            if some == fewer:
                continue
            if stop - start == 1:
                found.append((start, some & ~fewer))
                continue
            middle = (start + stop) // 2
            between = holders[node_of[(sums[middle - 1] + root) & KEY_MASK]]
            spans += (start, some, middle, between), (middle, between, stop, fewer)
        found.sort(reverse=True)
        return found

    def _add_new(self, holder: int, parent: int, keys: Sequence[int], has_parent: bool) -> list[int]:
        """Nodes for a chain of new keys after `parent`, with one holder that has the parent or not."""
        nodes = self._numbers(len(keys))
        depths, parents, first, own = self._depths, self._parents, self._first, self._keys
        depth = 0 if parent == NONE else depths[parent]
        if parent != NONE:
            sibling = self._next[nodes[0]] = first[parent]
            if sibling != NONE:
                self._previous[sibling] = nodes[0]
        for node, key in zip(nodes, keys, strict=True):
            depth += 1
            own[node], depths[node], parents[node] = key, depth, parent
            if parent != NONE:
                first[parent] = node
            parent = node
        self._node_of.update(zip(keys, nodes, strict=True))
        if has_parent:
            for node in nodes:
                self._holders[node] = holder
        else:
            self._orphaned.update(dict.fromkeys(nodes, holder))
        return nodes

    def _numbers(self, count: int) -> list[int]:
        """Node numbers without keys, those of removed nodes first."""
        reused = min(count, len(self._free))
        nodes = self._free[len(self._free) - reused :][::-1]
        del self._free[len(self._free) - reused :]
        size, more = len(self._holders), count - reused
        if more:
            self._keys.extend([0] * more)
            for column in (self._depths, self._parents, self._first, self._next, self._previous):
                column.extend([NONE] * more)
            self._holders += [0] * more
        return nodes + list(range(size, size + more))

    def _reattach(self, holder: int, node: int) -> None:
        """Restore the holder at the blocks after `node`."""
        self._remove_orphan(holder, node)
        pending = [node]
        while pending:
            for child in self._children(pending.pop()):
                if self._orphaned.get(child, 0) & holder:
                    self._remove_orphan(holder, child)
                    self._holders[child] |= holder
                    pending.append(child)

    def _detach(self, holder: int, node: int) -> None:
        self._holders[node] &= ~holder
        pending = [node]
        while pending:
            for child in self._children(pending.pop()):
                if self._holders[child] & holder:
                    self._holders[child] &= ~holder
                    self._orphaned[child] = self._orphaned.get(child, 0) | holder
                    pending.append(child)

    def _remove_orphan(self, holder: int, node: int) -> None:
        rest = self._orphaned.get(node, 0) & ~holder
        if rest:
            self._orphaned[node] = rest
        else:
            self._orphaned.pop(node, None)

    def _children(self, node: int) -> list[int]:
        children = []
        child = self._first[node]
        while child != NONE:
            children.append(child)
            child = self._next[child]
        return children

    def _prune(self, node: int) -> None:
        """Remove nodes without holders and children, upwards."""
        first, after, before = self._first, self._next, self._previous
        while node != NONE and not self._holders[node] and first[node] == NONE and node not in self._orphaned:
            parent, left, right = self._parents[node], before[node], after[node]
            if right != NONE:
                before[right] = left
                after[node] = NONE
            if left != NONE:
                after[left] = right
                before[node] = NONE
            elif parent != NONE:
                first[parent] = right
            del self._node_of[self._keys[node]]
            self._free.append(node)
            node = parent


class Holders(Sequence[int]):
    """The numbers of the set bits of an int, in increasing order. They are computed when they are first needed."""

    __slots__ = ("_bits", "_numbers")

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._numbers: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holders) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def _all(self) -> tuple[int, ...]:
        if self._numbers is None:
            self._numbers = members(self._bits)
        return self._numbers


_BIT = bytes(digit == ord("1") for digit in range(256))


@lru_cache(maxsize=4096)
def members(holders: int) -> tuple[int, ...]:
    """Indices of the set bits."""
    if holders & (holders - 1) == 0:
        return (holders.bit_length() - 1,) if holders else ()
    digits = f"{holders:b}".encode().translate(_BIT)
    return tuple(compress(range(len(digits)), reversed(digits)))
