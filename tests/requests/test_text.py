import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams
from paceline.core.sequence import FinishReason, Origin
from paceline.requests.text import RequestText, TextOutput, end_tokens


class PieceTokenizer:
    """Token `i` is `pieces[i]`, whole characters or parts of one."""

    is_byte_level = True
    eos_ids = frozenset({99})

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def context_free_text(self, token_id: int, skip_special: bool = True) -> str | None:
        return None


def output(stops: tuple[str, ...], *pieces: str | bytes) -> TextOutput:
    return TextOutput(PieceTokenizer(*pieces), SamplingParams(stop=stops))  # type: ignore[arg-type]


def feed(stops: tuple[str, ...], *pieces: str | bytes) -> tuple[list[str], bool]:
    """What each piece released, until a stop, and last what the end did."""
    text = output(stops, *pieces)
    released = []
    for token in range(len(pieces)):
        released.append(text.add([token], False))
        if text.stopped:
            break
    return [*released, text.add([], True)], text.stopped


def test_without_stops_everything_comes_out_at_once() -> None:
    assert feed((), "one", " two", "") == (["one", " two", "", ""], False)


def test_a_stop_inside_one_token_cuts_before_it() -> None:
    assert feed(("END",), "a", "bENDc", "d") == (["a", "b", ""], True)


def test_a_stop_across_tokens_is_held_back_from_its_first_character() -> None:
    assert feed(("STOP",), "x S", "T", "O", "P") == (["x ", "", "", "", ""], True)


def test_held_text_is_released_once_it_cannot_be_a_stop() -> None:
    assert feed(("STOP",), "S", "T", "A", "R") == (["", "", "STA", "R", ""], False)


def test_held_text_is_released_only_as_far_as_is_certain() -> None:
    assert feed(("aab",), "a", "a", "a", "b") == (["", "", "a", "", ""], True)


def test_flush_releases_a_stop_that_never_came() -> None:
    assert feed(("STOP",), "go ", "STO") == (["go ", "", "STO"], False)


def test_the_earliest_stop_wins() -> None:
    assert feed(("two", "one"), "x one two") == (["x ", ""], True)
    assert feed(("b", "abc"), "a", "b") == (["", "a", ""], True)


def test_nothing_follows_a_stop() -> None:
    text = output(("!",), "a!", "b")
    assert text.add([0, 1], False) == "a"
    assert text.stopped
    assert text.add([1], True) == ""


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    euro, cyclist = "€".encode(), "🚴".encode()
    pieces = (euro[:1], euro[1:2], euro[2:], cyclist[:3], cyclist[3:])
    assert feed((), *pieces) == (["", "", "€", "", "🚴", ""], False)


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    assert feed((), "a", "é".encode()[:1]) == (["a", "", "\ufffd"], False)


def test_stop_strings_of_any_script() -> None:
    accent = "é".encode()
    assert feed(("終わり",), "はい", "終", "わ", "り") == (["はい", "", "", "", ""], True)
    assert feed(("é",), "caf", accent[:1], accent[1:]) == (["caf", "", "", ""], True)


def test_a_stop_freed_by_the_flush_is_no_text_either() -> None:
    """`END` shares a token with half a character, so it becomes text only when the sequence ends."""
    assert feed(("END",), "a", b"bEND" + "é".encode()[:1]) == (["a", "", "b"], True)


@pytest.mark.parametrize("seed", range(20))
def test_any_split_gives_the_text_up_to_the_first_stop(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        whole = "".join(rng.choice("abé🚴") for _ in range(rng.randint(1, 30)))
        stops = tuple("".join(rng.choice("abé") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3)))
        data = whole.encode()
        cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randint(0, 20)))})
        pieces = [data[a:b] for a, b in pairwise(cuts)]
        released, stopped = feed(stops, *pieces)
        assert stopped == any(stop in whole for stop in stops)
        text = "".join(released)
        assert whole.startswith(text)
        assert not any(stop in text for stop in stops)
        if not stopped:
            assert text == whole
        else:
            assert any(whole[len(text) :].startswith(stop) for stop in stops)


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_an_end_token_is_not_text(stops: tuple[str, ...]) -> None:
    text = output(stops, "a", "b")
    assert text.add([0], False) == "a"
    assert text.add([1, 99], True) == "b"


def test_end_tokens_of_a_request() -> None:
    eos = frozenset({7})
    assert end_tokens(SamplingParams(), eos) == {7}
    assert end_tokens(SamplingParams(stop_token_ids=(3,)), eos) == {3, 7}
    assert end_tokens(SamplingParams(stop_token_ids=(3,), ignore_eos=True), eos) == {3}


def test_choices_of_a_request_have_separate_texts() -> None:
    accent = "é".encode()
    tokenizer = PieceTokenizer("a", accent[:1], accent[1:])
    text = RequestText(tokenizer, Request("r", (0,), SamplingParams(n=2)))  # type: ignore[arg-type]

    def add(choice: int, *tokens: int, reason: FinishReason | None = None) -> str:
        origins = (Origin.PLAIN,) * len(tokens)
        return text.add(StepOutput("r", choice, choice, tokens, origins, finish_reason=reason)).text

    assert [add(0, 0, 1), add(1, 0), add(0, 2), add(1, 1, reason=FinishReason.LENGTH)] == ["", "a", "aé", "\ufffd"]
