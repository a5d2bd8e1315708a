"""Every character of a streamed text belongs to one token, and pieces joined are the text."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.output import StepOutput
from paceline.core.sequence import Origin
from paceline.server.openai.answers.answer import OriginSplitter
from tests.server.fakes import byte_tokenizer, events, served

A, R, B, P = Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.PLAIN
TOKENIZER = byte_tokenizer()


def step(tokens: str | Sequence[int], origins: Sequence[Origin], text: str) -> StepOutput:
    """`tokens` as text is a token a byte."""
    ids = TOKENIZER.encode(tokens, add_special=False) if isinstance(tokens, str) else tokens
    return StepOutput("r", 0, 0, tuple(ids), tuple(origins), text)


def told(*steps: StepOutput) -> list[list[tuple[str, str]]]:
    trail = OriginSplitter(TOKENIZER)
    return [[(one["text"], one["origin"]) for one in trail.pieces(output)] for output in steps]


def test_a_piece_a_token() -> None:
    assert told(step("ab", [A, R], "ab"), step("c", [P], "c")) == [
        [("a", "accepted"), ("b", "recovered")],
        [("c", "plain")],
    ]


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    first, second = TOKENIZER.encode("é", add_special=False)
    assert told(step([first], [A], ""), step([second], [B], "é")) == [[], [("", "accepted"), ("é", "bonus")]]


def test_text_that_is_held_back_keeps_its_origin() -> None:
    """As with a stop string `bcX`: `bc` is certain only when something else follows."""
    steps = told(step("abc", [A, A, R], "a"), step("d", [B], "bcd"))
    assert steps == [[("a", "accepted")], [("b", "accepted"), ("c", "recovered"), ("d", "bonus")]]


def test_a_step_may_end_inside_a_token() -> None:
    """A byte that never becomes a character, and the one after it, are the text of one token."""
    first = TOKENIZER.encode("é", add_special=False)[0]
    steps = told(step([first], [A], ""), step("a", [B], "\ufffd"), step("b", [P], "ab"))
    assert steps == [[], [("", "accepted"), ("\ufffd", "bonus")], [("a", "bonus"), ("b", "plain")]]


def test_an_unfinished_character_at_the_end_is_its_tokens() -> None:
    first = TOKENIZER.encode("é", add_special=False)[0]
    assert told(step("a", [A], "a"), step([first], [R], "\ufffd"))[1][-1] == ("\ufffd", "recovered")


def test_the_end_of_a_sequence_is_no_text() -> None:
    eos = next(iter(TOKENIZER.eos_ids))
    assert told(step([*TOKENIZER.encode("a", add_special=False), eos], [A, B], "a")) == [[("a", "accepted")]]


# --- as streamed


def choices(path: str, **body: Any) -> list[dict[str, Any]]:
    response = served("Hello", per_step=3).post(path, {"stream": True, **body})
    assert response.status_code == 200, response.text
    return [choice for item in events(response)[:-1] for choice in json.loads(item)["choices"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_a_stream_has_them_when_asked(path: str, body: dict[str, Any]) -> None:
    found = choices(path, **body, n=2, stream_options={"include_origins": True})
    for index in (0, 1):
        pieces = [piece for choice in found if choice["index"] == index for piece in choice["origins"]]
        assert [piece["origin"] for piece in pieces] == ["accepted", "accepted", "bonus", "accepted", "bonus"]
        assert "".join(piece["text"] for piece in pieces) == "Hello"


def test_otherwise_not() -> None:
    assert all("origins" not in choice for choice in choices("/v1/completions", prompt="x"))
