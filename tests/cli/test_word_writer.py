"""Streamed words on a terminal of a few columns."""

import io
import re

import pytest
from rich.console import Console

from paceline.cli.word_writer import WordWriter


def screen(written: str, width: int) -> list[str]:
    """The lines that a terminal of this width shows."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|[^\x1b]", written):
        if part == "\n":
            lines.append("")
            column = 0
        elif part.endswith("D") and part.startswith("\x1b"):
            column -= int(part[2:-1])
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif not part.startswith("\x1b"):
            if column == width:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def shown(pieces: list[str], width: int = 12, is_terminal: bool = True) -> list[str]:
    file = io.StringIO()
    writer = WordWriter(Console(file=file, force_terminal=is_terminal, width=width, color_system=None))
    for piece in pieces:
        writer.write(piece)
    writer.end()
    return screen(file.getvalue(), width if is_terminal else 1000)


@pytest.mark.parametrize("size", range(1, 8))
def test_words_are_not_broken_however_the_text_arrives(size: int) -> None:
    text = "The quick brown fox jumps over\nthe lazy dog."
    lines = shown([text[i : i + size] for i in range(0, len(text), size)])
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(len(line) < 12 for line in lines)
    assert lines[:2] == ["The quick", "brown fox"]


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    assert "".join(shown(["a " + "x" * 30 + " b"])).replace(" ", "") == "a" + "x" * 30 + "b"


def test_lines_of_code_stay_as_they_are() -> None:
    code = "def_function(argument):_pass"
    lines = shown(["```py", "thon\n", code, "\n```\nsome more words here"], 12)
    assert "".join(lines[1:4]) == code
    assert lines[-2:] == ["some more", "words here"] or lines[-3:-1] == ["some more", "words here"]


def test_without_a_terminal_the_text_is_unchanged() -> None:
    assert shown(["The quick brown ", "fox jumps"], is_terminal=False)[0] == "The quick brown fox jumps"
