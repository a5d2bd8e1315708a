"""Prefixes that requests in flight will leave in a worker's cache, so that no other worker computes them too."""

from collections.abc import Sequence

from paceline.cluster.routing.kv_index import BLOCK_SIZE
from paceline.cluster.routing.prefix_tree import NONE


class Reservations:
    """The last prompt sent to each worker, for every first block. Prompts are chains of prefix numbers, as in `Match`."""

    def __init__(self) -> None:
        self._by_first: dict[int, dict[int, tuple[str, int, Sequence[int]]]] = {}
        """Request, key of its second block and chain, by the key of the first block and by worker."""
        self._keys: dict[str, tuple[int, int]] = {}
        """Keys into `_by_first`, by request."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request_id: str, worker: int, chain: Sequence[int]) -> None:
        if not len(chain):
            return
        first = chain[0]
        prompts = self._by_first.setdefault(first, {})
        before = prompts.get(worker)
        if before is not None:
            del self._keys[before[0]]
        prompts[worker] = request_id, _second(chain), chain
        self._keys[request_id] = first, worker

    def remove(self, request_id: str) -> None:
        """The request ended. Its blocks are known from KV events."""
        keys = self._keys.pop(request_id, None)
        if keys is not None:
            first, worker = keys
            prompts = self._by_first[first]
            del prompts[worker]
            if not prompts:
                del self._by_first[first]

    def match(self, chain: Sequence[int]) -> list[tuple[int, tuple[int]]]:
        """(tokens of this prompt that the worker will hold, the worker), unordered."""
        if not len(chain):
            return []
        prompts = self._by_first.get(chain[0])
        if prompts is None:
            return []
        second = _second(chain)
        return [
            (_num_common(chain, other) * BLOCK_SIZE if other_second == second else BLOCK_SIZE, (worker,))
            for worker, (_, other_second, other) in prompts.items()
        ]


def _second(chain: Sequence[int]) -> int:
    """Key of the second block, or NONE."""
    return chain[1] if len(chain) > 1 else NONE


def _num_common(chain: Sequence[int], other: Sequence[int]) -> int:
    """Blocks in common, at least one. Prefix numbers are equal only if the whole prefix is, so bisection finds the last."""
    low, high = 1, min(len(chain), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
