"""Text of committed tokens, up to a stop string."""

from collections.abc import Sequence

from paceline.models.tokenizer.text_stream import TextStream


class TextOutput:
    """The text of one sequence. Text that may still become part of a stop string is held back."""

    def __init__(self, stream: TextStream, stops: tuple[str, ...]) -> None:
        self._stream = stream
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Text that is now certain. Sets `stopped` when a stop string is complete; the stop string is not part of the text."""
        new = self._stream.push(tokens)
        return self._take(new) if self._stops else new

    def flush(self) -> str:
        """The text held back, at the end of a sequence without a stop string."""
        if self.stopped:
            return ""
        text = self._take(self._stream.flush())
        text, self._held = text + self._held, ""
        return text

    def _take(self, new: str) -> str:
        self._held += new
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = self._possible_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
