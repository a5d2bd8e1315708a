import random

import pytest

from paceline.model_files.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from paceline.model_files.tokenizer.tokenizer import TextStream, Tokenizer
from tests.model_files.tokenizer.test_tokenizer import GOLDENS, SENTENCEPIECE


def _pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = TextStream(tokenizer, skip_special)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("skip_special", [True, False])
def test_the_joined_text_equals_decode(smollm2: Tokenizer, skip_special: bool) -> None:
    for _, ids in GOLDENS:
        pieces = _pieces(smollm2, ids, skip_special)
        assert "".join(pieces) == smollm2.decode(ids, skip_special)
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_returned_as_early_as_possible(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("so 😀!")
    *pieces, rest = _pieces(smollm2, ids)
    assert rest == ""
    assert pieces[0] == "so"
    assert pieces[-2].endswith("😀")
    assert pieces[-1] == "!"


def test_an_unfinished_character_is_pending_until_flush(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("😀")[:-1]
    *pieces, rest = _pieces(smollm2, ids)
    assert "".join(pieces) == ""
    assert rest == smollm2.decode(ids)
    assert set(rest) == {"\ufffd"}


def test_random_ids_equal_decode(smollm2: Tokenizer) -> None:
    """Random tokens include parts of characters, special tokens and unknown ids."""
    draw = random.Random(0)
    broken = [i for i in range(17, 400) if not smollm2.token_bytes(i).isascii()]
    for _ in range(200):
        ids = [draw.choice((draw.randrange(49160), draw.choice(broken), draw.randrange(3))) for _ in range(12)]
        assert "".join(_pieces(smollm2, ids)) == smollm2.decode(ids)


def test_a_leading_space_is_stripped_once() -> None:
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE)
    a, space, b, end = 259, 260, 262, 2
    for ids in ([a, a], [1, a, end, a], [space, space, b], [a, space, end, space, a], [space, end, a, b]):
        assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)
    split = [3 + byte for byte in "é".encode()]
    assert _pieces(tokenizer, [b, *split, b]) == ["b", "", "é", "b", ""]


def test_a_text_that_continues_another_keeps_its_first_space(smollm2: Tokenizer) -> None:
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE)
    a, space, b = 259, 260, 262
    byte = [3 + byte for byte in "é".encode()]
    for before in (a, space, b, 3 + ord("\n")):
        for ids in ([a], [a, b], [space, b], [b, a], [*byte, a], [*byte]):
            stream = TextStream(tokenizer, before=before)
            text = "".join([*(stream.push(i) for i in ids), stream.flush()])
            assert tokenizer.decode([b, before, *ids]) == tokenizer.decode([b, before]) + text
    for before in (1, byte[0]):  # no text, or half a character: the text starts anew
        assert TextStream(tokenizer, before=before).push(a) == tokenizer.decode([a])
    assert TextStream(smollm2, before=smollm2.encode("a")[0]).push(smollm2.encode(" b")) == " b"


def test_several_ids_at_once(smollm2: Tokenizer) -> None:
    text, ids = GOLDENS[4]
    stream = TextStream(smollm2)
    assert stream.push(ids[:7]) + stream.push([]) + stream.push(ids[7:]) + stream.flush() == text


@pytest.mark.parametrize("skip_special", [True, False])
def test_random_ids_in_groups_of_random_size(smollm2: Tokenizer, skip_special: bool) -> None:
    draw = random.Random(1)
    broken = [i for i in range(17, 400) if not smollm2.token_bytes(i).isascii()]
    for _ in range(200):
        ids = [draw.choice((draw.randrange(49160), draw.choice(broken), draw.randrange(3))) for _ in range(16)]
        stream, text, start = TextStream(smollm2, skip_special), "", 0
        while start < len(ids):
            end = start + draw.randint(1, 4)
            text, start = text + stream.push(ids[start:end]), end
        assert text + stream.flush() == smollm2.decode(ids, skip_special)
