"""N-grams by their first token, the latest first, within a bound."""

from collections import OrderedDict
from collections.abc import Sequence

MAX_KEYS = 4096
PER_KEY = 8


class NgramPool:
    """At most `per_key` n-grams of each of at most `max_keys` first tokens; what was not seen for longest goes first."""

    def __init__(self, per_key: int = PER_KEY, max_keys: int = MAX_KEYS) -> None:
        if per_key < 1 or max_keys < 1:
            raise ValueError(f"a pool needs room: got per_key {per_key}, max_keys {max_keys}")
        self._per_key, self._max_keys = per_key, max_keys
        self._rests: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(rests) for rests in self._rests.values())

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        rests = self._rests.setdefault(first, OrderedDict())
        self._rests.move_to_end(first)
        rests[rest] = None
        rests.move_to_end(rest)
        if len(rests) > self._per_key:
            rests.popitem(last=False)
        if len(self._rests) > self._max_keys:
            self._rests.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, the latest first."""
        return list(reversed(self._rests.get(token, {})))
