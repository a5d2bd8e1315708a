"""Questions to all target workers for the tokens of a stream that another gateway began, and their answers."""

import itertools
from collections.abc import Mapping
from concurrent.futures import Future

from paceline.runtime.gateway_client.target_connection import TargetConnection
from paceline.runtime.wire.gateway_messages import TokensRequest
from paceline.runtime.wire.target_messages import TokensReply

REPLY_SECONDS = 2.0
"""Time that workers have to answer a `TokensRequest`."""


class TokensReplies:
    """Collects the answers and keeps the longest one: a worker that lost the stream earlier has fewer tokens."""

    def __init__(self, num_asked: int, deadline: float, future: "Future[TokensReply | None]") -> None:
        self._num_missing, self._deadline, self._future = num_asked, deadline, future
        self._best: TokensReply | None = None

    def add(self, answer: TokensReply) -> None:
        self._num_missing -= 1
        if answer.seed is not None and (self._best is None or _num_tokens(answer) > _num_tokens(self._best)):
            self._best = answer

    def is_complete(self, now: float) -> bool:
        return self._num_missing <= 0 or now >= self._deadline

    def finish(self) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(self._best)


class TokensRequests:
    """Used by one thread, the pool's. Times are seconds on its clock."""

    def __init__(self, targets: Mapping[str, TargetConnection]) -> None:
        """`targets` is a live view of the connections."""
        self._targets = targets
        self._numbers = itertools.count(1)
        self._open: dict[int, TokensReplies] = {}

    def start(self, key: str, future: "Future[TokensReply | None]", now: float) -> None:
        """Ask every worker. `future` receives the longest answer. It receives None if no worker knows the key."""
        number = next(self._numbers)
        targets = [target for target in self._targets.values() if target.welcome is not None]
        num_asked = sum(target.send(TokensRequest(number, key)) for target in targets)
        self._open[number] = TokensReplies(num_asked, now + REPLY_SECONDS, future)

    def add(self, answer: TokensReply) -> None:
        if answer.number in self._open:  # otherwise it is late
            self._open[answer.number].add(answer)

    def finish_complete(self, now: float) -> None:
        """Finish the requests that have all answers or no time left."""
        for number in [number for number, recall in self._open.items() if recall.is_complete(now)]:
            self._open.pop(number).finish()

    def finish_all(self) -> None:
        """Finish all requests with the answers so far."""
        while self._open:
            self._open.popitem()[1].finish()


def _num_tokens(answer: TokensReply) -> int:
    return sum(map(len, answer.choices))
