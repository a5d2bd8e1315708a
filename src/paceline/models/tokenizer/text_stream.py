"""Token ids in, one at a time; text out as soon as it can no longer change."""

from collections.abc import Iterable

from paceline.models.tokenizer.tokenizer import REPLACEMENT, Tokenizer


class TextStream:
    """What `push` and `flush` return, joined, equals `decode` of all ids; no piece ends inside a character.

    Tokens whose text depends on others are decoded together with the last piece that gave text: some decoders treat the first
    token of a text differently, and only the difference is new.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []
        self._num_given = 0
        """Leading ids of the window whose text was returned already, as `_given`."""
        self._given = ""

    def push(self, ids: int | Iterable[int]) -> str:
        ids = (ids,) if isinstance(ids, int) else tuple(ids)
        if len(self._window) == self._num_given:  # nothing is held back
            texts = [self._tokenizer.alone(token, self._skip_special) for token in ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]  # there is no None
        self._window.extend(ids)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is still held back: an unfinished character becomes U+FFFD."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:
            self._window = self._window[self._num_given :]
            self._num_given = len(self._window)
            self._given = self._decode(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
