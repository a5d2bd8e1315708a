"""Synthetic traffic: a rate, lengths, shared prefixes and bursts."""

import math
import random
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest
from paceline.planning.traces.trace import BLOCK_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class TrafficPattern:
    """Requests per second, their lengths in tokens, and how they share prefixes."""

    rate: float
    prompt_tokens: int
    """Mean tokens of a prompt, its shared prefix included."""
    output_tokens: int
    """Mean tokens of an answer."""
    spread: float = 0.5
    """Standard deviation of lengths over their mean; lengths are log-normal."""
    prefix_tokens: int = 0
    """Tokens of the prefix that the requests of one group share."""
    prefix_groups: int = 1
    burst: float = 1.0
    """Standard deviation of the gaps between arrivals over their mean. 1 gives Poisson arrivals, 0 even arrivals."""

    def __post_init__(self) -> None:
        numbers = (self.rate, self.spread, self.burst)
        if not all(map(math.isfinite, numbers)) or self.rate <= 0.0 or min(self.spread, self.burst) < 0.0:
            raise InvalidRequest(
                f"traffic needs a rate above 0, spread and burst of 0 or more, got {numbers}", field="rate"
            )
        if self.output_tokens < 1 or self.prompt_tokens <= self.prefix_tokens or self.prefix_tokens < 0:
            raise InvalidRequest(
                "traffic needs answers of at least 1 token and prompts longer than their prefix", field="rate"
            )
        if self.prefix_groups < 1:
            raise InvalidRequest(f"prefix groups must be at least 1, got {self.prefix_groups}", field="rate")


def synthesize(traffic: TrafficPattern, seconds: float, seed: int = 0) -> Trace:
    """Requests of this traffic that arrive within `seconds`; the same seed gives the same trace."""
    if not math.isfinite(seconds) or seconds <= 0.0:
        raise InvalidRequest(f"a synthetic trace needs a time above 0 seconds, got {seconds}", field="seconds")
    dice, now, requests = random.Random(seed), 0.0, []
    shared = traffic.prefix_tokens // BLOCK_TOKENS
    while now < seconds:
        group = dice.randrange(traffic.prefix_groups)
        requests.append(
            TraceRequest(
                now,
                traffic.prefix_tokens + _length(dice, traffic.prompt_tokens - traffic.prefix_tokens, traffic.spread),
                _length(dice, traffic.output_tokens, traffic.spread),
                tuple(range(1 + group * shared, 1 + (group + 1) * shared)),
            )
        )
        now += _gap(dice, traffic)
    return Trace(f"synthetic, {traffic.rate:g} requests/s", tuple(requests))


def _gap(dice: random.Random, traffic: TrafficPattern) -> float:
    """A gamma variate with mean 1 / rate and the standard deviation `burst` / rate."""
    if not traffic.burst:
        return 1.0 / traffic.rate
    shape = traffic.burst**-2
    return dice.gammavariate(shape, 1.0 / (shape * traffic.rate))


def _length(dice: random.Random, mean: int, spread: float) -> int:
    variance = math.log1p(spread * spread)
    return max(1, round(mean * math.exp(dice.gauss(0.0, math.sqrt(variance)) - variance / 2.0)))
