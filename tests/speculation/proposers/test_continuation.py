import pytest

from paceline.speculation.proposers.continuation import ESCAPE, FLOOR, MAX_FOLLOWERS, grow
from paceline.speculation.proposers.suffix_automaton import SuffixAutomaton
from paceline.speculation.trees.tree import depths


def text(*tokens: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    return automaton


def test_a_long_match_is_followed_deeper_than_a_short_one() -> None:
    passage = list(range(10, 40))
    long = text(*passage, 99, *passage[:12])
    short = text(*passage, 99, passage[0])
    deep, shallow = (grow(index, index.end, 16) for index in (long, short))
    assert deep.tokens[:8] == tuple(passage[12:20])
    assert len(shallow) < len(deep)
    assert shallow.expected < deep.expected


def test_a_fork_becomes_a_tree_the_likelier_branch_first() -> None:
    index = text(1, 2, 3, 5, 1, 2, 4, 6, 8, 1, 2, 4, 7, 9, 1, 2)
    guess = grow(index, index.end, 8)
    roots = [token for token, parent in zip(guess.tokens, guess.parents, strict=True) if parent == -1]
    assert roots[:2] == [4, 3]
    assert guess.tokens[0] == 4
    assert all(parent < node for node, parent in enumerate(guess.parents))


def test_chances_follow_the_equation() -> None:
    index = text(1, 2, 3, 9, 1, 2)  # one match of two tokens, once followed by 3
    guess = grow(index, index.end, 1)
    assert guess.tokens == (3,)
    assert guess.expected == pytest.approx(1 / (1 + ESCAPE / 2))


def test_the_budget_and_the_floor_bound_the_tree() -> None:
    loop = text(*([5, 6, 7] * 20))
    for budget in (1, 3, 10):
        guess = grow(loop, loop.end, budget)
        assert len(guess) == budget
        assert max(depths(guess.parents)) == budget
    assert guess.tokens == (5, 6, 7, 5, 6, 7, 5, 6, 7, 5)
    rare = text(1, 2, 1, 3, 1, 4, 1, 5, 1)  # 1 is followed by each of four tokens once: 1 / (4 + 2) each, then less
    assert len(grow(rare, rare.end, 16)) <= 1 / FLOOR


def test_a_context_followed_by_anything_predicts_nothing() -> None:
    tokens = [t for other in range(2, MAX_FOLLOWERS + 4) for t in (1, other)]
    index = text(*tokens, 1)
    assert len(grow(index, index.end, 8)) == 0


def test_no_context_no_guess() -> None:
    assert len(grow(SuffixAutomaton(), (0, 0), 8)) == 0
