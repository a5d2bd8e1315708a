"""Which ways to guess a backend offers."""

from collections.abc import Callable

from paceline.core.errors import InvalidRequest
from paceline.core.flags import SpeculationFlags
from paceline.engine.proposers import LOOKUPS, MODELS

METHODS = (*LOOKUPS, "lookahead", *MODELS, "combined", "pool")


def offered_methods(validate: Callable[[SpeculationFlags], None]) -> tuple[str, ...]:
    """Those that `validate` lets a flag name."""

    def is_offered(method: str) -> bool:
        try:
            validate(SpeculationFlags(method=method))
        except InvalidRequest:
            return False
        return True

    return tuple(method for method in METHODS if is_offered(method))
