"""The same short generation on every worker of a pool: who says something else is ill. Pure.

With coupled verification the text is a function of seed and model alone, so the answers of healthy workers are equal.
"""

from collections import Counter
from collections.abc import Mapping

Answer = tuple[int, ...]


class CanaryJury:
    """Keeps each worker's last answer and says who differs from the others."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._agreed: Answer | None = None

    def hear(self, worker: str, answer: Answer) -> Mapping[str, bool]:
        """Whether each worker that has answered agrees with the pool.

        Most voices win. With as many on either side the answer that was agreed on before stays right, or else the first.
        """
        self._answers[worker] = answer
        votes = Counter(self._answers.values())
        most = max(votes.values())
        favourites = [one for one, count in votes.items() if count == most]
        if self._agreed not in favourites:
            self._agreed = favourites[0]
        return {name: one == self._agreed for name, one in self._answers.items()}

    def forget(self, worker: str) -> None:
        """It left, or started anew: it votes again when it has answered again."""
        self._answers.pop(worker, None)
