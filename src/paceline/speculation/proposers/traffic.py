"""The outputs of recent requests, kept apart by salt and within a bound."""

from collections import OrderedDict
from collections.abc import Sequence

from paceline.speculation.proposers.suffix_automaton import SuffixAutomaton

MAX_TOKENS = 65_536
"""Of all salts together; a token takes about half a kilobyte."""


class RecentTraffic:
    """Texts by salt. A salt has a young index that grows and an old one: when the young one is full it becomes the old
    one, whose texts are forgotten. Whoever exceeds the bound of all makes the longest unused salt forget first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        if max_tokens < 4:
            raise ValueError(f"recent traffic needs room for at least 4 tokens, got {max_tokens}")
        self._max_tokens = max_tokens
        self._young_tokens = max_tokens // 4
        self._shelves: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()  # least recently used first
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, salt: str, text: Sequence[int]) -> None:
        text = text[-self._young_tokens :]
        if not text:
            return
        shelf = self._shelves.setdefault(salt, [SuffixAutomaton()])
        self._shelves.move_to_end(salt)
        if len(shelf[0]) + len(text) > self._young_tokens:
            shelf.insert(0, SuffixAutomaton())
            self._forget(shelf, keep=2)
        shelf[0].restart()
        shelf[0].extend(text)
        self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            oldest = next(iter(self._shelves))
            self._forget(self._shelves.pop(oldest), keep=0)

    def indices(self, salt: str) -> Sequence[SuffixAutomaton]:
        """Of this salt's texts, the youngest first."""
        shelf = self._shelves.get(salt)
        if shelf is None:
            return ()
        self._shelves.move_to_end(salt)
        return shelf

    def _forget(self, shelf: list[SuffixAutomaton], keep: int) -> None:
        while len(shelf) > keep:
            self._num_tokens -= len(shelf.pop())
