"""Every substring of a text and how often it occurs, in space linear in the text.

A state stands for substrings that end at the same places; `length` is that of its longest one. Its suffix link leads to
the longest suffix that occurs elsewhere too. Appending a token costs amortised constant time plus the walk that counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = 0
MAX_COUNTED = 32
"""Suffixes whose count an appended token raises. Only a text that repeats one token over and over has more, and there
every suffix goes on alike."""


class SuffixAutomaton:
    """Grows by tokens; never shrinks. `restart` begins another text, whose substrings do not join with the last one's."""

    def __init__(self) -> None:
        self._lengths = [0]
        self._links = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._counts = [0]
        self._last = ROOT
        self._size = 0

    def __len__(self) -> int:
        """Tokens appended."""
        return self._size

    def restart(self) -> None:
        self._last = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        counts, links = self._counts, self._links
        for token in tokens:
            self._last = self._append(token)
            self._size += 1
            state = self._last
            for _ in range(MAX_COUNTED):
                if state == ROOT:
                    break
                counts[state] += 1
                state = links[state]

    @property
    def end(self) -> tuple[int, int]:
        """(state, length) of the whole text so far: `contexts` of it are its suffixes that occurred before."""
        return self._last, self._lengths[self._last]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(state, length) of the longest suffix of `tokens` that occurs in the texts; the root and 0 if none does."""
        state = length = 0
        for token in tokens:
            while state != ROOT and token not in self._next[state]:
                state = self._links[state]
                length = self._lengths[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return state, length

    def contexts(self, state: int, length: int) -> Iterator[tuple[int, Mapping[int, int]]]:
        """(length, {token that followed: the state it leads to}) of `state` and then of ever shorter suffixes, down to one
        token. The end of the text has no follower but its suffixes do: a loop leads round and round."""
        while state != ROOT:
            if self._next[state]:
                yield length, self._next[state]
            state = self._links[state]
            length = self._lengths[state]

    def count(self, state: int) -> int:
        """How often the substrings of `state` occur."""
        return self._counts[state]

    def _append(self, token: int) -> int:
        lengths, links, edges = self._lengths, self._links, self._next
        state = self._last
        if token in edges[state]:  # only after `restart`: an earlier text begins alike
            known = edges[state][token]
            return known if lengths[known] == lengths[state] + 1 else self._split(state, token, known)
        new = self._add(lengths[state] + 1, {})
        while state != -1 and token not in edges[state]:
            edges[state][token] = new
            state = links[state]
        if state == -1:
            links[new] = ROOT
        else:
            known = edges[state][token]
            links[new] = known if lengths[known] == lengths[state] + 1 else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """A state of its own for those substrings of `known` that are reached from `state`: they now end elsewhere too."""
        edges, links = self._next, self._links
        clone = self._add(self._lengths[state] + 1, dict(edges[known]))
        self._counts[clone] = self._counts[known]
        links[clone] = links[known]
        links[known] = clone
        while state != -1 and edges[state].get(token) == known:
            edges[state][token] = clone
            state = links[state]
        return clone

    def _add(self, length: int, edges: dict[int, int]) -> int:
        self._lengths.append(length)
        self._links.append(ROOT)
        self._next.append(edges)
        self._counts.append(0)
        return len(self._lengths) - 1
