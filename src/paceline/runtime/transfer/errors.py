"""How a transfer ends when it does not arrive."""

from paceline.core.errors import PacelineError


class TransferFailed(PacelineError):
    """What was wanted did not arrive, or not as it was given. Compute it, or take it from elsewhere."""


class TransferCancelled(PacelineError):
    """The taker no longer wanted it."""


class KindUnavailable(PacelineError):
    """This way does not lead to that depot: try the next."""
