"""How long to wait before a worker that died is started again. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffRule:
    first: float = 0.5
    most: float = 30.0
    forgiven: float = 60.0
    """Seconds alive after which earlier deaths no longer count."""


class Backoff:
    """Doubles from death to death."""

    def __init__(self, rule: BackoffRule | None = None) -> None:
        self._rule = rule or BackoffRule()
        self._deaths = 0

    @property
    def deaths(self) -> int:
        """In a row."""
        return self._deaths

    def delay(self, lived: float) -> float:
        """Seconds to wait after a death at the age of `lived`."""
        if lived >= self._rule.forgiven:
            self._deaths = 0
        seconds = min(self._rule.most, self._rule.first * 2.0**self._deaths)
        self._deaths += 1
        return seconds
