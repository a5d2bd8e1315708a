"""What an operator may change while the engine runs."""

from dataclasses import dataclass

from paceline.core.config import MAX_DEPTH
from paceline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SpeculationFlags:
    """`None` leaves a choice to the configuration. What a request asks for applies within these."""

    enabled: bool | None = None
    method: str | None = None
    """For requests that name none."""
    max_depth: int | None = None
    """Bounds the configuration's `max_depth`; it cannot raise it."""

    def __post_init__(self) -> None:
        if self.enabled is not None and not isinstance(self.enabled, bool):
            raise InvalidRequest(f"enabled must be true, false or null, got {self.enabled!r}", field="enabled")
        if self.method is not None and not isinstance(self.method, str):
            raise InvalidRequest(f"method must be a string or null, got {self.method!r}", field="method")
        depth = self.max_depth
        if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or not 0 <= depth <= MAX_DEPTH):
            raise InvalidRequest(
                f"max_depth must be an integer in [0, {MAX_DEPTH}] or null, got {depth!r}", field="max_depth"
            )
