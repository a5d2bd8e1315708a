"""Limits of open connections: of one address, and of all."""

import ipaddress
from collections import Counter

from paceline.core.errors import InvalidConfig


class ConnectionLimits:
    """Counts open connections. All calls must come from the event loop's thread."""

    def __init__(self, in_all: int, per_address: int) -> None:
        if in_all < 1 or per_address < 1:
            raise InvalidConfig("max_connections and max_connections_per_address must be at least 1")
        self._in_all, self._per_address = in_all, per_address
        self._open: Counter[str] = Counter()
        self._num_open = 0

    def enter(self, address: str) -> bool:
        """Counts a connection of `address`; False if that would exceed a limit."""
        origin = network_of(address)
        if self._num_open >= self._in_all or self._open[origin] >= self._per_address:
            return False
        self._open[origin] += 1
        self._num_open += 1
        return True

    def leave(self, address: str) -> None:
        """Ends the count of a connection that `enter` accepted."""
        origin = network_of(address)
        self._num_open -= 1
        self._open[origin] -= 1
        if not self._open[origin]:
            del self._open[origin]


def network_of(address: str) -> str:
    """What one client controls: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a local socket has no address
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
