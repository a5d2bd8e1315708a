"""An index of every substring of a text with its number of occurrences, in space linear in the text.

A state is a set of substrings that end at the same positions; `length` is the length of the longest. Its suffix link leads to
the longest suffix that also occurs elsewhere. Appending a token takes amortised constant time plus the update of counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = 0
MAX_COUNTED = 32
"""Suffixes whose count an appended token raises. Only a text that repeats one token has more, and all of its suffixes have
the same continuation."""


class SuffixAutomaton:
    """Grows by tokens and never shrinks. `restart` starts another text: no substring spans two texts."""

    def __init__(self) -> None:
        self._lengths = [0]
        self._links = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._counts = [0]
        self._last = ROOT
        self._size = 0

    def __len__(self) -> int:
        """The number of tokens appended."""
        return self._size

    def restart(self) -> None:
        self._last = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        counts, links, lengths, edges = self._counts, self._links, self._lengths, self._next
        last, size = self._last, self._size
        for token in tokens:
            followers = edges[last]
            if token in followers:  # only after `restart`: an earlier text starts the same
                known = followers[token]
                last = known if lengths[known] == lengths[last] + 1 else self._split(last, token, known)
            else:
                new, state = len(lengths), last
                lengths.append(lengths[last] + 1)
                links.append(ROOT)
                edges.append({})
                counts.append(0)
                while state != -1 and token not in followers:
                    followers[token] = new
                    state = links[state]
                    followers = edges[state]
                if state != -1:
                    known = followers[token]
                    is_whole = lengths[known] == lengths[state] + 1
                    links[new] = known if is_whole else self._split(state, token, known)
                last = new
            size += 1
            state = last
            for _ in range(MAX_COUNTED):
                if state == ROOT:
                    break
                counts[state] += 1
                state = links[state]
        self._last, self._size = last, size

    @property
    def end(self) -> tuple[int, int]:
        """(state, length) of the whole text; its `contexts` are the suffixes that occurred before."""
        return self._last, self._lengths[self._last]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(state, length) of the longest suffix of `tokens` that occurs in the texts; (root, 0) if none does."""
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
        """(length, {follower: its state}) of `state` and then of its suffixes, down to one token. The end of the text has no
        follower, but its suffixes do."""
        while state != ROOT:
            if self._next[state]:
                yield length, self._next[state]
            state = self._links[state]
            length = self._lengths[state]

    def count(self, state: int) -> int:
        """Occurrences of the substrings of `state`."""
        return self._counts[state]

    def _split(self, state: int, token: int, known: int) -> int:
        """Move the substrings of `known` that are reached from `state` to a new state: they now end at other positions."""
        edges, links = self._next, self._links
        clone = len(links)
        self._lengths.append(self._lengths[state] + 1)
        self._counts.append(self._counts[known])
        edges.append(dict(edges[known]))
        links.append(links[known])
        links[known] = clone
        while state != -1 and edges[state].get(token) == known:
            edges[state][token] = clone
            state = links[state]
        return clone
