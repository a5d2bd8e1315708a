"""Answers of all workers to the question for a resumable stream."""

from concurrent.futures import Future

from paceline.runtime.wire.gateway_messages import Recalled


class RecallAnswers:
    """Collects the answers and keeps the longest one: a worker that lost the stream earlier has fewer tokens."""

    def __init__(self, num_asked: int, deadline: float, future: "Future[Recalled | None]") -> None:
        self._num_missing, self._deadline, self._future = num_asked, deadline, future
        self._best: Recalled | None = None

    def add(self, answer: Recalled) -> None:
        self._num_missing -= 1
        if answer.seed is not None and (self._best is None or _num_tokens(answer) > _num_tokens(self._best)):
            self._best = answer

    def is_complete(self, now: float) -> bool:
        return self._num_missing <= 0 or now >= self._deadline

    def finish(self) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_result(self._best)


def _num_tokens(answer: Recalled) -> int:
    return sum(map(len, answer.choices))
