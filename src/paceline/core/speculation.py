"""How one request wants to be speculated for: the `speculation` object of the API."""

from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.errors import InvalidRequest

Verification = Literal["coupled", "rejection"]


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """`None` leaves the choice to the server. A request may ask for less than the server offers, never for more."""

    enabled: bool = True
    method: str | None = None
    max_depth: int | None = None
    verification: Verification | None = None

    def __post_init__(self) -> None:
        if self.max_depth is not None and not (isinstance(self.max_depth, int) and self.max_depth >= 0):
            raise InvalidRequest(
                f"max_depth must be an integer, 0 or more, got {self.max_depth!r}", field="speculation.max_depth"
            )
        if self.verification is not None and self.verification not in get_args(Verification):
            raise InvalidRequest(
                f"verification must be one of {', '.join(get_args(Verification))}, got {self.verification!r}",
                field="speculation.verification",
            )
