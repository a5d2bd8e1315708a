"""Colours of tokens by origin: accepted, recovered, bonus or plain."""

from collections.abc import Iterator

from rich.text import Text

from paceline.core.output import StepOutput
from paceline.core.sequence import Origin
from paceline.models.tokenizer.text_stream import TextStream
from paceline.models.tokenizer.tokenizer import Tokenizer

STYLES = {
    Origin.ACCEPTED: "green",
    Origin.RECOVERED: "yellow",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "default",
}

MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.RECOVERED: "the target's token in place of a rejected draft",
    Origin.BONUS: "the target's token after a draft accepted whole",
    Origin.PLAIN: "decoded without a draft",
}


class Painter:
    """Colours one answer. The joined results of `paint` and `flush` are its text, unless a stop string cuts it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._eos_ids = tokenizer.eos_ids
        self._last = Origin.PLAIN

    def paint(self, output: StepOutput) -> Text:
        return Text.assemble(*self._pieces(output))

    def flush(self) -> Text:
        """Text held back because a character was incomplete."""
        return Text(self._stream.flush(), STYLES[self._last])

    def _pieces(self, output: StepOutput) -> Iterator[tuple[str, str]]:
        for token, origin in zip(output.tokens, output.origins, strict=True):
            if token not in self._eos_ids:
                self._last = origin
                yield self._stream.push(token), STYLES[origin]


def legend() -> Text:
    lines = (Text.assemble(("■ ", STYLES[o]), (f"{o.value:<10}", STYLES[o]), MEANINGS[o]) for o in Origin)
    return Text("\n").join(lines)
