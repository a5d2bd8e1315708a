"""Token origins: every character belongs to one token, and the pieces join to the text."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sequence import Origin
from paceline.gateway.openai.answer import OriginSplitter
from tests.gateway.fakes import FINGERPRINT, byte_tokenizer, events, served

A, R, B, P = Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.PLAIN
TOKENIZER = byte_tokenizer()


def step(tokens: str | Sequence[int], origins: Sequence[Origin], text: str) -> StepOutput:
    """`tokens` as text has one token per byte."""
    ids = TOKENIZER.encode(tokens, add_special=False) if isinstance(tokens, str) else tokens
    return StepOutput("r", 0, 0, tuple(ids), tuple(origins), text)


def split(*steps: StepOutput) -> list[list[tuple[str, str]]]:
    splitter = OriginSplitter(TOKENIZER)
    return [[(one["text"], one["origin"]) for one in splitter.split(output)] for output in steps]


def test_one_piece_per_token() -> None:
    assert split(step("ab", [A, R], "ab"), step("c", [P], "c")) == [
        [("a", "accepted"), ("b", "recovered")],
        [("c", "plain")],
    ]


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    first, second = TOKENIZER.encode("é", add_special=False)
    assert split(step([first], [A], ""), step([second], [B], "é")) == [[], [("", "accepted"), ("é", "bonus")]]


def test_held_text_keeps_its_origin() -> None:
    """With the stop string `bcX` the text `bc` is released when another character follows."""
    steps = split(step("abc", [A, A, R], "a"), step("d", [B], "bcd"))
    assert steps == [[("a", "accepted")], [("b", "accepted"), ("c", "recovered"), ("d", "bonus")]]


def test_a_step_may_end_inside_a_token() -> None:
    """A byte without a character and the next one are the text of one token."""
    first = TOKENIZER.encode("é", add_special=False)[0]
    steps = split(step([first], [A], ""), step("a", [B], "\ufffd"), step("b", [P], "ab"))
    assert steps == [[], [("", "accepted"), ("\ufffd", "bonus")], [("a", "bonus"), ("b", "plain")]]


def test_an_incomplete_character_at_the_end_belongs_to_its_token() -> None:
    first = TOKENIZER.encode("é", add_special=False)[0]
    assert split(step("a", [A], "a"), step([first], [R], "\ufffd"))[1][-1] == ("\ufffd", "recovered")


def test_the_eos_token_has_no_piece() -> None:
    eos = next(iter(TOKENIZER.eos_ids))
    assert split(step([*TOKENIZER.encode("a", add_special=False), eos], [A, B], "a")) == [[("a", "accepted")]]


# --- over HTTP


def choices(path: str, **body: Any) -> list[dict[str, Any]]:
    response = served("Hello", per_step=3).post(path, {"stream": True, **body})
    assert response.status_code == 200, response.text
    return [choice for item in events(response)[:-1] for choice in json.loads(item)["choices"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_include_origins_adds_origins(path: str, body: dict[str, Any]) -> None:
    found = choices(path, **body, n=2, stream_options={"include_origins": True})
    for index in (0, 1):
        pieces = [piece for choice in found if choice["index"] == index for piece in choice["origins"]]
        assert [piece["origin"] for piece in pieces] == ["accepted", "accepted", "bonus", "accepted", "bonus"]
        assert "".join(piece["text"] for piece in pieces) == "Hello"


def test_origins_are_absent_by_default() -> None:
    assert all("origins" not in choice for choice in choices("/v1/completions", prompt="x"))


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_responses_and_chunks_have_the_fingerprint_of_their_worker(path: str, body: dict[str, Any]) -> None:
    server = served("Hello", per_step=3)
    assert server.post(path, body).json()["system_fingerprint"] == FINGERPRINT
    chunks = [json.loads(item) for item in events(server.post(path, {"stream": True, **body}))[:-1]]
    assert [chunk["system_fingerprint"] for chunk in chunks] == [FINGERPRINT] * len(chunks)
    server.target.fingerprint = ""  # the server of another engine
    assert server.post(path, body).json()["system_fingerprint"] is None


def test_choices_of_workers_with_different_fingerprints_have_none() -> None:
    found = iter(("fp_1", "fp_1", "fp_1", "fp_2"))

    def text(_: Request) -> str:
        server.target.fingerprint = next(found)
        return "Hello"

    server = served(text)
    body = {"prompt": ["x", "y"]}
    assert server.post("/v1/completions", body).json()["system_fingerprint"] == "fp_1"
    assert server.post("/v1/completions", body).json()["system_fingerprint"] is None
