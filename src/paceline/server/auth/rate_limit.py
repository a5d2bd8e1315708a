"""What one key may use: requests and tokens a minute, and choices at once. Time comes from the caller.

Allowances fill up continuously, to a minute's worth. Prompts are paid for on the way in and outputs as they are generated,
so that nobody pays for tokens they only might have used; an allowance may go below zero by what was in flight, and the next
request then waits for longer.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.server.auth.api_keys import ApiKey, KeyLimits
from paceline.server.openai.errors import BadRequest, RateLimited


class Allowance:
    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def wait(self, amount: int, now: float) -> float:
        """Seconds until `amount` may be taken; 0: now."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60.0 / self.per_minute)

    def take(self, amount: int, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now


class Account:
    """What a key has left."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.running = 0
        self.grant(limits, now)

    def grant(self, limits: KeyLimits, now: float) -> None:
        """Full allowances; what is running goes on counting."""
        self.limits = limits
        self.requests = _allowance(limits.requests_per_minute, now)
        self.tokens = _allowance(limits.tokens_per_minute, now)

    def check(self, requests: int, choices: int, tokens: int, now: float) -> None:
        limits = self.limits
        _possible("requests", requests, limits.requests_per_minute, "requests a minute")
        _possible("choices", choices, limits.max_concurrent, "choices at once")
        _possible("prompt tokens", tokens, limits.tokens_per_minute, "tokens a minute")
        if limits.max_concurrent is not None and self.running + choices > limits.max_concurrent:
            raise RateLimited(f"this key may have {limits.max_concurrent} choices at once, and has them", 1)
        for allowance, amount, unit in ((self.requests, requests, "requests"), (self.tokens, max(1, tokens), "tokens")):
            if allowance is None:
                continue
            seconds = allowance.wait(amount, now)
            if seconds > 0:
                raise RateLimited(f"this key may use {allowance.per_minute} {unit} a minute", math.ceil(seconds))

    def spend(self, tokens: int, now: float) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens, now)


class RateLimits:
    """An account for every key that has come by. Lives on one thread, the event loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def check(self, key: ApiKey, requests: int, choices: int, tokens: int = 0) -> None:
        """Raise `RateLimited` with when to come back, or `BadRequest` for what the key may never have."""
        if key.limits != KeyLimits():
            self._account(key).check(requests, choices, tokens, self._clock())

    @contextmanager
    def enter(self, key: ApiKey, requests: int, choices: int, tokens: int) -> Iterator[Account]:
        """`check`, and take it. Inside the block the choices are running."""
        account = self._account(key)
        now = self._clock()
        account.check(requests, choices, tokens, now)
        if account.requests is not None:
            account.requests.take(requests, now)
        account.spend(tokens, now)
        account.running += choices
        try:
            yield account
        finally:
            account.running -= choices

    def spend(self, account: Account, tokens: int) -> None:
        account.spend(tokens, self._clock())

    def _account(self, key: ApiKey) -> Account:
        account = self._accounts.get(key.id)
        if account is None:
            account = self._accounts[key.id] = Account(key.limits, self._clock())
        elif account.limits != key.limits:  # the file was changed
            account.grant(key.limits, self._clock())
        return account


def _allowance(per_minute: int | None, now: float) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute, now)


def _possible(what: str, amount: int, limit: int | None, unit: str) -> None:
    if limit is not None and amount > limit:
        raise BadRequest(
            f"{amount} {what} are more than this key is ever allowed ({limit} {unit}): ask for fewer",
            code="over_key_limit",
        )
