"""Incremental detokenisation: returns text as soon as later tokens cannot change it."""

from collections.abc import Iterable

from paceline.models.tokenizer.tokenizer import REPLACEMENT, Tokenizer


class TextStream:
    """The joined results of `push` and `flush` equal `decode` of all ids. No result ends inside a character.

    A token whose text depends on its neighbours is decoded together with the tokens of the last result, because some decoders
    treat the first token of a text differently. Only the difference is returned.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []
        self._num_returned = 0
        """Leading ids of the window whose text, `_returned`, was already returned."""
        self._returned = ""

    def push(self, ids: int | Iterable[int]) -> str:
        """Add token ids. Returns the new text, possibly empty."""
        ids = (ids,) if isinstance(ids, int) else tuple(ids)
        if len(self._window) == self._num_returned:  # no text is pending
            texts = [self._tokenizer.context_free_text(token, self._skip_special) for token in ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]  # checked above
        self._window.extend(ids)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The pending text; an unfinished character becomes U+FFFD."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._returned) :]
        if new:
            self._window = self._window[self._num_returned :]
            self._num_returned = len(self._window)
            self._returned = self._decode(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
