"""Limits the wrong keys of one address."""

from collections import OrderedDict
from collections.abc import Callable

from paceline.server.auth.rate_limit import Allowance
from paceline.server.connection_limits import network_of

WRONG_KEYS_PER_MINUTE = 30
MAX_ADDRESSES = 10_000
"""Addresses that are remembered; the one that was longest without a wrong key is forgotten first."""


class WrongKeys:
    """Counts wrong keys by address. The caller passes no time: `clock` returns it."""

    def __init__(self, clock: Callable[[], float], per_minute: int = WRONG_KEYS_PER_MINUTE) -> None:
        self._clock, self._per_minute = clock, per_minute
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()

    def wait_seconds(self, address: str) -> float:
        """Seconds until this address may try another key; 0 if it may now."""
        allowance = self._allowances.get(network_of(address))
        return 0.0 if allowance is None else allowance.wait_seconds(1, self._clock())

    def record(self, address: str) -> None:
        """Counts a wrong key."""
        network, now = network_of(address), self._clock()
        allowance = self._allowances.pop(network, None) or Allowance(self._per_minute, now)
        allowance.take(1, now)
        self._allowances[network] = allowance
        if len(self._allowances) > MAX_ADDRESSES:
            self._allowances.popitem(last=False)
