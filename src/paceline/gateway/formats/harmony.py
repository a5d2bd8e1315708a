"""The format of gpt-oss: an answer is a sequence of messages, each with a channel.

`<|channel|>analysis<|message|>…<|end|>` is reasoning, `final` is the answer, and `commentary to=functions.f` has the arguments
of a call. The recipient may come before the channel, and `<|constrain|>json` may be missing.
"""

import re

from paceline.gateway.formats.pieces import CallSink, Piece, Reasoning, first_marker, num_partial

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MARKERS = (MESSAGE, "<|constrain|>", *ENDS)
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
STARTS = ("<|", "assistant", "to=")
MAX_HEADER = 512


class HarmonyParser:
    """Splits an answer into text, reasoning and calls."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._held = ""
        self._kind: str | None = None
        """`text`, `reasoning` or `call` inside a message, `bare` in text without a header, None in a header."""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        while self._read_header() if self._kind is None else self._read_message():
            pass
        return self._sink.take()

    def flush(self) -> list[Piece]:
        if self._kind is not None:
            self._emit(self._held)
        self._held = ""
        return self._sink.take()

    def _read_header(self) -> bool:
        header, found, rest = self._held.partition(MESSAGE)
        if found:
            self._held = rest
            channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
            if recipient is not None and recipient[1] in self._sink.tools:
                self._kind = "call"
                self._sink.begin(recipient[1])
            return True
        start = header.lstrip()
        is_header = any(start.startswith(word) or word.startswith(start) for word in STARTS)
        if is_header and len(header) < MAX_HEADER:
            return False
        self._kind = "bare"
        return True

    def _read_message(self) -> bool:
        found = first_marker(self._held, ENDS)
        if found is None:
            keep = num_partial(self._held, ENDS)
            decided, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            self._emit(decided)
            return False
        at, marker = found
        self._emit(self._held[:at])
        # The header of the next message begins with these
        self._held = self._held[at if marker in ("<|start|>", "<|channel|>") else at + len(marker) :]
        self._kind = None
        return bool(self._held)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning":
            self._sink.pieces.append(Reasoning(text))
        elif self._kind == "call":
            self._sink.add(text)
        else:
            self._sink.text(text)
