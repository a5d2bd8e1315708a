import random
from collections import Counter
from collections.abc import Sequence

import pytest

from paceline.speculation.proposers.suffix import SuffixAutomaton


def occurrences(texts: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    size = len(part)
    return sum(list(text[i : i + size]) == list(part) for text in texts for i in range(len(text) - size + 1))


def followers(texts: Sequence[Sequence[int]], part: Sequence[int]) -> Counter[int]:
    size = len(part)
    return Counter(
        text[i + size] for text in texts for i in range(len(text) - size) if list(text[i : i + size]) == list(part)
    )


def build(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.restart()
        automaton.extend(text)
    return automaton


@pytest.mark.parametrize("seed", range(8))
def test_contexts_equal_those_of_a_full_scan(seed: int) -> None:
    """Every context of a random query occurs with these followers and counts, and no longer context exists."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 24))] for _ in range(rng.randint(1, 4))]
    automaton = build(texts)
    assert len(automaton) == sum(map(len, texts))
    for _ in range(60):
        query = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        longest = max(n for n in range(len(query) + 1) if n == 0 or occurrences(texts, query[-n:]))
        state, length = automaton.match(query)
        assert length == longest
        seen = []
        for size, after in automaton.contexts(state, length):
            assert {t: automaton.count(s) for t, s in after.items()} == followers(texts, query[-size:])
            seen.append(size)
        # each distinct set of followers is returned with its longest context
        wanted, last = [], Counter[int]()
        for size in range(longest, 0, -1):
            found = followers(texts, query[-size:])
            if found and (found != last):
                wanted.append(size)
            last = found
        assert set(wanted) <= set(seen)


def test_contexts_of_the_end_are_earlier_occurrences() -> None:
    automaton = build([[1, 2, 3, 9, 1, 2]])
    sizes = [(size, set(after)) for size, after in automaton.contexts(*automaton.end)]
    assert sizes == [(2, {3})]
    automaton.extend([3])
    assert [(size, set(after)) for size, after in automaton.contexts(*automaton.end)] == [(3, {9})]


def test_a_text_without_repetition_has_no_contexts() -> None:
    automaton = build([[1, 2, 3]])
    assert list(automaton.contexts(*automaton.end)) == []
    assert SuffixAutomaton().match([1, 2]) == (0, 0)


def test_no_substring_spans_two_texts() -> None:
    automaton = build([[1, 2], [3, 4]])
    state, length = automaton.match([1, 2])
    assert length == 2
    assert list(automaton.contexts(state, length)) == []


def test_a_repeated_token_takes_linear_time() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7] * 5_000)
    size, after = next(iter(automaton.contexts(*automaton.end)))
    assert (size, set(after)) == (4_999, {7})
