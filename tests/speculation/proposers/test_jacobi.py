import pytest

from paceline.speculation.proposers.jacobi import JacobiWindow


def follow(token: int) -> int:
    """The text that the target writes: each token has one successor."""
    return (3 * token + 1) % 17


def test_guesses_converge_to_the_target_s_text_and_leave_its_ngrams() -> None:
    window, start, found = JacobiWindow(3), 5, []
    guesses = [8, 8, 8, 8, 8]
    for turn in range(8):
        found += window.advance(start, guesses, [follow(token) for token in guesses])
        start += 1 + turn % 2
        guesses = [*window.guesses(start), 0, 0][:5]
    assert found
    assert all(follow(a) == b and follow(b) == c for a, b, c in found)


def test_picks_are_the_guesses_one_place_on() -> None:
    window = JacobiWindow(2)
    assert window.guesses(0) == []
    assert window.advance(10, [1, 2, 3], [4, 5, 6]) == [(1, 4), (2, 5), (3, 6)]
    assert window.guesses(11) == [4, 5, 6]
    assert window.guesses(12) == [5, 6]
    assert window.guesses(10) == []


def test_a_diagonal_needs_all_its_rounds() -> None:
    window = JacobiWindow(3)
    assert window.advance(0, [1, 2], [3, 4]) == []
    # the window is filled up with 9: nobody's pick, but what 8 was picked after
    assert window.advance(1, [3, 4, 9], [6, 7, 8]) == [(1, 3, 6), (2, 4, 7)]
    with pytest.raises(ValueError, match="at least 2"):
        JacobiWindow(1)
