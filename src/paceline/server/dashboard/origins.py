"""Which part of a streamed text came from where."""

from collections import deque
from typing import Any

from paceline.core.output import StepOutput
from paceline.core.sequence import Origin
from paceline.models.tokenizer.text_stream import TextStream
from paceline.models.tokenizer.tokenizer import Tokenizer


class OriginTrail:
    """Of one choice. What `pieces` returns, joined, is the text of the steps; a token whose text is held back, because a
    character is incomplete or may belong to a stop string, comes with the step that hands its text out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._eos_ids = tokenizer.eos_ids
        self._ahead: deque[tuple[int, Origin]] = deque()
        """Lengths of tokens' texts that no step has handed out yet."""
        self._last = Origin.PLAIN

    def pieces(self, output: StepOutput) -> list[dict[str, Any]]:
        """One a token, in order."""
        for token, origin in zip(output.tokens, output.origins, strict=True):
            if token not in self._eos_ids:
                self._ahead.append((len(self._stream.push(token)), origin))
        text, found = output.text, []
        while text and self._ahead and self._ahead[0][0] <= len(text):
            length, self._last = self._ahead.popleft()
            found.append({"text": text[:length], "origin": self._last.value})
            text = text[length:]
        if text:  # the step ends inside a token, or hands out what was left of an unfinished character
            if self._ahead:
                length, self._last = self._ahead.popleft()
                self._ahead.appendleft((length - len(text), self._last))
            found.append({"text": text, "origin": self._last.value})
        return found
