"""Classes of traffic: what the acceptance of drafts depends on, and what is therefore learned apart."""

from typing import NamedTuple

TRIAL_LABEL = " (new draft)"
"""End of the shown category of a draft on trial."""
PARTIAL_LABEL = "/partial"
"""End of the shown category of drafts that attend to less than half of the tokens."""


class TrafficClass(NamedTuple):
    """The sequences for which acceptance, depth and circuit breaker are tracked together."""

    method: str
    category: str
    """The category of the request."""
    on_trial: bool = False
    """Whether a draft on trial drafts for them."""
    is_partial: bool = False
    """Whether the draft attends to less than half of the tokens, because it lacks their hidden states. Such drafts are worse,
    and are not to lower what is expected of others."""

    @property
    def shown_category(self) -> str:
        """The category in reports, metrics and logs. It tells the classes of a method apart."""
        return self.category + TRIAL_LABEL * self.on_trial + PARTIAL_LABEL * self.is_partial
