"""What prompts that are under way will leave in a worker's cache: nobody should compute elsewhere what is about to be there."""

from collections.abc import Sequence

from paceline.cluster.routing.kv_index import BLOCK_SIZE
from paceline.cluster.routing.prefix_tree import KEY_MASK


class Promises:
    """Of the prompts that begin with the same block, the one last sent to each worker counts. Prompts come as in `Match`: the
    numbers of their prefixes, block by block, and what their salt adds to them."""

    def __init__(self) -> None:
        self._by_first: dict[int, dict[int, tuple[str, Sequence[int]]]] = {}
        """By the key of the first block and the worker: request and prompt."""
        self._kept: dict[str, tuple[int, int]] = {}
        """By request: where it is found above."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, worker: int, chain: Sequence[int], root: int) -> None:
        if not len(chain):
            return
        first = (chain[0] + root) & KEY_MASK
        prompts = self._by_first.setdefault(first, {})
        before = prompts.get(worker)
        if before is not None:
            del self._kept[before[0]]
        prompts[worker] = request_id, chain
        self._kept[request_id] = first, worker

    def drop(self, request_id: str) -> None:
        """It is over, wherever it was; what it left is known from the worker."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            first, worker = kept
            prompts = self._by_first[first]
            del prompts[worker]
            if not prompts:
                del self._by_first[first]

    def match(self, chain: Sequence[int], root: int) -> list[tuple[int, tuple[int]]]:
        """(tokens, the worker that will have so many of this prompt's beginning), in any order."""
        if not len(chain):
            return []
        prompts = self._by_first.get((chain[0] + root) & KEY_MASK, {})
        return [(_common(chain, other) * BLOCK_SIZE, (worker,)) for worker, (_, other) in prompts.items()]


def _common(chain: Sequence[int], other: Sequence[int]) -> int:
    """Blocks that both begin with, at least one: a prefix's number is equal only if all of it is, so it is bisected."""
    low, high = 1, min(len(chain), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
