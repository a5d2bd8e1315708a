"""Recent times of a draft worker's passes."""


class DraftPassTimes:
    """Moving averages over about ten passes, in seconds. They are 0 until they are known."""

    def __init__(self) -> None:
        self.average = 0.0
        self._urgent = 0.0
        """Time of a pass that a target waits for."""
        self._ahead = 0.0
        """Time of the last pass if all of it was ahead. The messages received next may have waited for its end."""

    @property
    def ahead_delay(self) -> float:
        """The number of urgent passes by which the last pass ahead delayed the messages received next."""
        # A message arrived at any moment of the pass ahead: on average it waited for half of it
        return 0.5 * self._ahead / self._urgent if self._urgent else 0.0

    def start_iteration(self) -> None:
        """The messages that waited for the last pass are handled."""
        self._ahead = 0.0

    def observe(self, seconds: float, is_urgent: bool) -> None:
        """A pass took `seconds`. `is_urgent` says that a target waited for some of its branches."""
        self.average = _moving_average(self.average, seconds)
        if is_urgent:
            self._urgent = _moving_average(self._urgent, seconds)
        else:
            self._ahead = seconds


def _moving_average(average: float, value: float) -> float:
    return average + 0.1 * (value - average) if average else value
