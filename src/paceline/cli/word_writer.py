"""Writes streamed text to a terminal so that no word is broken at its edge."""

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

FENCE = "```"


class WordWriter:
    """A word that passes the edge of the terminal moves to the next line, also if its beginning is shown. Lines of code,
    between fences, stay as they are, so that they can be copied. A console without a terminal gets the plain text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._line = ""
        """The line so far, which may be a fence."""
        self._word: list[tuple[str, str]] = []
        """Pieces of the word at the end of the line, with their styles."""
        self._is_code = False

    def write(self, text: str, style: str = "") -> None:
        if not self._console.is_terminal:
            self._console.file.write(text)
        else:
            for piece in re.findall(r"\n|[^\S\n]+|\S+", text):
                self._write_piece(piece, style)
        self._console.file.flush()

    def end(self) -> None:
        """Go to the beginning of a line."""
        if self._line or not self._console.is_terminal:
            self.write("\n")

    def _write_piece(self, piece: str, style: str) -> None:
        if piece == "\n":
            if self._line.lstrip().startswith(FENCE):
                self._is_code = not self._is_code
            self._column, self._line, self._word = 0, "", []
            self._print(piece, "")
            return
        self._line += piece
        if self._is_code or self._line.lstrip().startswith(FENCE):
            self._advance(piece, style)
        elif piece.isspace():
            self._word = []
            if self._column + cell_len(piece) < self._console.width:
                self._advance(piece, style)
            elif self._column:
                self._break()
        else:
            self._add_to_word(piece, style)

    def _add_to_word(self, piece: str, style: str) -> None:
        before = sum(cell_len(text) for text, _ in self._word)
        width = cell_len(piece)
        # The last column stays free: a terminal that fills it has not yet moved to the next line
        if (
            self._column + width >= self._console.width
            and before < self._column
            and before + width < self._console.width
        ):
            if before:
                self._console.file.write(f"\x1b[{before}D\x1b[K")
            self._break()
            for text, its_style in self._word:
                self._advance(text, its_style)
        self._word.append((piece, style))
        self._advance(piece, style)

    def _break(self) -> None:
        self._print("\n", "")
        self._column = 0

    def _advance(self, text: str, style: str) -> None:
        self._print(text, style)
        self._column = (self._column + cell_len(text)) % self._console.width

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)
