"""Output tokens of resumable streams, kept for a while after they ended or lost their gateway."""

from array import array
from collections.abc import Callable, Sequence

from paceline.core.request import Request

KEEP_SECONDS = 60.0
MAX_TOKENS = 4_000_000
"""Tokens kept in all, four bytes each. Beyond them the oldest ended streams are dropped."""


class ResumableStream:
    """The seed of a stream and its output tokens by choice, including those that other workers committed."""

    __slots__ = ("choices", "end", "ended", "is_running", "seed")

    def __init__(self, request: Request, is_running: Callable[[], bool], end: Callable[[], None]) -> None:
        assert request.sampling.seed is not None
        self.seed = request.sampling.seed
        committed = request.committed or ((),) * request.sampling.n
        self.choices = [array("I", tokens or ()) for tokens in committed]
        self.is_running = is_running
        self.end = end
        """Stops the stream because its client has resumed it through another gateway."""
        self.ended: float | None = None
        """Time since which it does not run."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices))

    def add(self, choice: int, tokens: Sequence[int]) -> None:
        self.choices[choice].extend(tokens)


class ResumableStreams:
    """Streams by resume key. The caller passes the time, in seconds."""

    def __init__(self, seconds: float = KEEP_SECONDS, max_tokens: int = MAX_TOKENS) -> None:
        self._seconds, self._max_tokens = seconds, max_tokens
        self._streams: dict[str, ResumableStream] = {}

    def keep(self, request: Request, is_running: Callable[[], bool], end: Callable[[], None]) -> ResumableStream:
        """Keep the tokens of a request that starts now. One with the same key is replaced."""
        self._streams.pop(request.resume_key, None)
        stream = self._streams[request.resume_key] = ResumableStream(request, is_running, end)
        return stream

    def find(self, key: str) -> ResumableStream | None:
        return self._streams.get(key)

    def clear(self) -> None:
        """Forget all streams: their tokens were generated with other weights."""
        self._streams.clear()

    def expire(self, now: float) -> None:
        """Drop the streams that ended long ago, and the oldest ended ones if there are too many tokens."""
        total = 0
        for key, stream in list(self._streams.items()):
            if stream.is_running():
                stream.ended = None
            elif stream.ended is None:
                stream.ended = now
            elif now - stream.ended > self._seconds:
                del self._streams[key]
                continue
            total += stream.num_tokens
        for key, stream in list(self._streams.items()):
            if total <= self._max_tokens:
                break
            if stream.ended is not None:
                total -= stream.num_tokens
                del self._streams[key]
