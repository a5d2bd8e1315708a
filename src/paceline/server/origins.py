# FIXME: stand-in. The dashboard's own version of this file was overwritten by mistake at 06:13 (by the access task) and could
# not be recovered; this is a guess from its use in answer.py. Its author should put the original back over it.
"""Where the text of a streamed choice came from, token by token."""

from paceline.core.output import StepOutput
from paceline.models.text_stream import TextStream
from paceline.models.tokenizer import Tokenizer


class OriginTrail:
    """One choice. The texts of `pieces`, joined, are the choice's text, as long as no stop string cuts it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._eos_ids = tokenizer.eos_ids

    def pieces(self, output: StepOutput) -> list[dict[str, str]]:
        return [
            {"text": self._stream.push(token), "origin": origin.value}
            for token, origin in zip(output.tokens, output.origins, strict=True)
            if token not in self._eos_ids
        ]
