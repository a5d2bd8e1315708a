"""Rate limits of API keys (requests per minute, tokens per minute, concurrent choices), and limits of open connections.

An allowance refills continuously up to one minute's amount. A body is charged by its size before any work; on admission the
exact prompt takes the place of that charge. Output tokens are charged as they are generated, so a request never pays for
`max_tokens`. Running requests may push an allowance below zero; the next request then waits longer. The caller passes the time.

`ConnectionLimits` limits the open connections of one address, and of all.
"""

import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from paceline.core.errors import InvalidConfig
from paceline.gateway.api.errors import BadRequest, RateLimited
from paceline.gateway.auth.api_keys import ApiKey, KeyLimits
from paceline.policy.overload import Allowance


class ConnectionLimits:
    """Counts open connections. A full server closes the connection that was idle for longest in favour of a new one: of the
    same address, or of any if all are too many. All calls must come from the event loop's thread."""

    def __init__(self, in_all: int, per_address: int) -> None:
        if in_all < 1 or per_address < 1:
            raise InvalidConfig("max_connections and max_connections_per_address must be at least 1")
        self._in_all, self._per_address = in_all, per_address
        self._open: Counter[str] = Counter()
        self._num_open = 0
        self._idle: OrderedDict[Callable[[], None], str] = OrderedDict()
        """What closes each idle connection, with its origin, the longest idle first."""

    def enter(self, address: str) -> bool:
        """Counts a connection of `address`; False if that would exceed a limit and no connection is idle."""
        origin = network_of(address)
        if self._open[origin] >= self._per_address:
            self._close_idle(origin)
        elif self._num_open >= self._in_all:
            self._close_idle(None)
        if self._num_open >= self._in_all or self._open[origin] >= self._per_address:
            if not self._open[origin]:
                del self._open[origin]
            return False
        self._open[origin] += 1
        self._num_open += 1
        return True

    def set_idle(self, address: str, close: Callable[[], None]) -> None:
        """The connection waits for a request. `close` must close it, and call `leave`."""
        self._idle[close] = network_of(address)

    def set_busy(self, close: Callable[[], None]) -> None:
        """The connection has a request, or was closed."""
        self._idle.pop(close, None)

    def _close_idle(self, origin: str | None) -> None:
        close = next((close for close, other in self._idle.items() if origin in (None, other)), None)
        if close is not None:
            del self._idle[close]
            close()

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


BODY_BYTES_PER_TOKEN = 8
"""Bytes of a body that are charged as one token before the prompt is encoded."""
WRONG_KEYS_PER_MINUTE = 30
MAX_ADDRESSES = 10_000
"""Addresses with wrong keys that are remembered; the one that was longest without a wrong key is forgotten first."""


@dataclass(frozen=True, slots=True)
class AllowanceLeft:
    """What is left of one minute's allowance."""

    unit: str
    limit: int
    remaining: int
    reset_seconds: float
    """Seconds until all of it is available."""


class Account:
    """The remaining allowances of one key."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.num_running = 0
        self.set_limits(limits, now)

    def set_limits(self, limits: KeyLimits, now: float) -> None:
        """Sets new limits with full allowances. Running choices still count."""
        self.limits = limits
        self.requests = _allowance(limits.requests_per_minute, now)
        self.tokens = _allowance(limits.tokens_per_minute, now)

    def check(self, requests: int, choices: int, tokens: int, now: float) -> None:
        limits = self.limits
        _check_possible("requests", requests, limits.requests_per_minute, "requests per minute")
        _check_possible("choices", choices, limits.max_concurrent, "choices at once")
        _check_possible("prompt tokens", tokens, limits.tokens_per_minute, "tokens per minute")
        if limits.max_concurrent is not None and self.num_running + choices > limits.max_concurrent:
            raise RateLimited(f"this key may run {limits.max_concurrent} choices at once", 1)
        for allowance, amount, unit in ((self.requests, requests, "requests"), (self.tokens, max(1, tokens), "tokens")):
            if allowance is None:
                continue
            seconds = allowance.wait_seconds(amount, now)
            if seconds > 0:
                raise RateLimited(f"this key may use {allowance.per_minute} {unit} per minute", math.ceil(seconds))

    def spend(self, tokens: int, now: float) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens, now)


class BodyCharge:
    """What one request body took from its key before it was read. It stays taken if the request is not admitted."""

    def __init__(self, account: Account | None, tokens: int) -> None:
        """`account` pays for the body. It is None for a key without limits."""
        self._account, self._tokens = account, tokens

    def take(self, now: float) -> None:
        self._add(1, now)

    def give_back(self, now: float) -> None:
        """Return the charge: the exact one follows."""
        self._add(-1, now)

    def _add(self, sign: int, now: float) -> None:
        if self._account is None:
            return
        if self._account.requests is not None:
            self._account.requests.take(sign, now)
        self._account.spend(sign * self._tokens, now)


class RateLimits:
    """One account per key. All calls must come from the event loop's thread."""

    def __init__(self, clock: Callable[[], float], num_gateways: int = 1) -> None:
        """`num_gateways` is the number of gateways that serve the same keys. Each enforces its share of a limit, at least 1."""
        self._clock, self._num_gateways = clock, num_gateways
        self._accounts: dict[str, Account] = {}

    def check(self, key: ApiKey, requests: int, choices: int, tokens: int = 0) -> None:
        """Raises `RateLimited`, or `BadRequest` if the request exceeds a limit as a whole."""
        if key.limits != KeyLimits():
            self._account(key).check(requests, choices, tokens, self._clock())

    def charge_body(self, key: ApiKey, num_bytes: int) -> BodyCharge:
        """Takes one request and the body's size in tokens. Raises `RateLimited` if the key has no allowance left."""
        if key.limits == KeyLimits():
            return BodyCharge(None, 0)
        account, now, tokens = self._account(key), self._clock(), num_bytes // BODY_BYTES_PER_TOKEN
        account.check(1, 0, 0, now)
        charge = BodyCharge(account, tokens)
        charge.take(now)
        return charge

    def left(self, key: ApiKey) -> list[AllowanceLeft]:
        """What is left of the allowances of the key: requests and tokens, if it has such limits."""
        if key.limits == KeyLimits():
            return []
        account, now = self._account(key), self._clock()
        allowances = (("requests", account.requests), ("tokens", account.tokens))
        return [_left(unit, allowance, now) for unit, allowance in allowances if allowance is not None]

    def give_back(self, charge: BodyCharge) -> None:
        charge.give_back(self._clock())

    @contextmanager
    def without(self, charge: BodyCharge | None) -> Iterator[None]:
        """Inside the block the charge is not taken: the exact amounts are checked."""
        if charge is None:
            yield
            return
        charge.give_back(self._clock())
        try:
            yield
        finally:
            charge.take(self._clock())

    @contextmanager
    def take(self, key: ApiKey, requests: int, choices: int, tokens: int) -> Iterator[Account]:
        """Checks the limits and takes the amounts. Inside the block the choices count as running."""
        account = self._account(key)
        now = self._clock()
        account.check(requests, choices, tokens, now)
        if account.requests is not None:
            account.requests.take(requests, now)
        account.spend(tokens, now)
        account.num_running += choices
        try:
            yield account
        finally:
            account.num_running -= choices

    def spend(self, account: Account, tokens: int) -> None:
        account.spend(tokens, self._clock())

    def _account(self, key: ApiKey) -> Account:
        account, limits = self._accounts.get(key.id), _share(key.limits, self._num_gateways)
        if account is None:
            account = self._accounts[key.id] = Account(limits, self._clock())
        elif account.limits != limits:  # the key file has new limits
            account.set_limits(limits, self._clock())
        return account


def _share(limits: KeyLimits, count: int) -> KeyLimits:
    """One gateway's share of the limits."""
    values = {name: None if value is None else max(1, value // count) for name, value in asdict(limits).items()}
    return limits if count == 1 else KeyLimits(**values)


def _left(unit: str, allowance: Allowance, now: float) -> AllowanceLeft:
    limit = int(allowance.per_minute)
    seconds = allowance.wait_seconds(limit, now)
    return AllowanceLeft(unit, limit, max(0, int(round(limit - seconds * limit / 60.0, 6))), seconds)


def _allowance(per_minute: int | None, now: float) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute, now)


def _check_possible(what: str, amount: int, limit: int | None, unit: str) -> None:
    if limit is not None and amount > limit:
        raise BadRequest(
            f"{amount} {what} exceed the limit of this key ({limit} {unit}): send fewer",
            code="over_key_limit",
        )


class WrongKeys:
    """Limits the wrong keys of one address. `clock` returns the time."""

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
