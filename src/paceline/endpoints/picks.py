"""The target's own tokens from log-probabilities, and the accepted part of a draft."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.endpoints.endpoint import EndpointRound, Outcome

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise of one token of the first choice, without torch.

    The function is the same as in `speculation/verification/noise.py`, and a test compares their values. So a text that is
    sampled from another engine's log-probabilities uses the noise of our engine at the same seed and position."""
    a, b, c = _words(seed, position)
    bits = _avalanche(((_avalanche(token) ^ a) * (b | 1)) & _MASK_32) ^ c
    u = min((bits + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -math.log(-math.log1p(-u))


@lru_cache(maxsize=64)
def _words(seed: int, position: int) -> tuple[int, int, int]:
    """The key bits of a position."""
    state = 0
    for part in (0, seed, 0):  # purpose, seed, choice
        state = _splitmix(state ^ part)
    low = _splitmix(state ^ position)
    return low & _MASK_32, low >> 32, _splitmix(low) & _MASK_32


def _avalanche(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK_32
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _MASK_32
    return x ^ (x >> 15)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


MAX_TOP = 20
"""Alternatives that servers report for one token unless configured otherwise."""


def refuse_processed(sampling: SamplingParams, kind: str) -> str | None:
    """The reason why raw log-probabilities do not determine `p` with these parameters. None if they do."""
    causes = {
        "penalties": sampling.has_penalties,
        "logit_bias": bool(sampling.logit_bias),
        "a JSON schema": sampling.json_schema is not None,
        "min_tokens": sampling.min_tokens > 0,
    }
    names = [name for name, is_set in causes.items() if is_set]
    if names:
        return f"{kind} reports log-probabilities without {' and '.join(names)}: remove them, or use a Paceline target"
    if not sampling.is_greedy and not 1 <= sampling.top_k <= MAX_TOP:
        return (
            f"{kind} reports {MAX_TOP} log-probabilities for a token, and sampling needs all that it may choose: "
            f"set top_k to at most {MAX_TOP}, temperature to 0, or use a Paceline target"
        )
    return None


def pick(row: Mapping[int, float], sampling: SamplingParams, position: int) -> int:
    """argmax(log p + G) over the most likely tokens {id: log-probability}. Under greedy sampling it is the most likely token,
    and at a tie the lowest id.

    `row` holds at least `top_k` tokens. `position` is that of the token to be chosen, prompt included.
    """
    ranked = sorted(row.items(), key=lambda item: (-item[1], item[0]))
    if sampling.is_greedy:
        return ranked[0][0]
    assert sampling.seed is not None
    best = ranked[0][1]
    scores = [(token, (score - best) / sampling.temperature) for token, score in ranked[: sampling.top_k]]
    floor = math.log(sampling.min_p) if sampling.min_p else -math.inf
    scores = [(token, score) for token, score in scores if score >= floor]
    total, before, kept = sum(math.exp(score) for _, score in scores), 0.0, []
    for token, score in scores:
        if sampling.top_p < 1.0 and before >= sampling.top_p * total:
            break
        kept.append((token, score))
        before += math.exp(score)
    return max(kept, key=lambda item: item[1] + gumbel(sampling.seed or 0, position, item[0]))[0]


def accept(round_: EndpointRound, picks: Sequence[int]) -> Outcome:
    """The outcome of a round whose rows have these picks: after the committed tokens, then after each drafted one. `picks` may
    end after the first that differs from the draft."""
    accepted = 0
    while accepted < len(round_.draft) and picks[accepted] == round_.draft[accepted]:
        accepted += 1
    tokens = (*round_.draft[:accepted], picks[accepted])
    for count, token in enumerate(tokens, 1):
        if token in round_.ends and not round_.sampling.ignore_eos:
            return Outcome(tokens[:count], accepted, FinishReason.STOP)
        if token in round_.sampling.stop_token_ids:
            return Outcome(tokens[:count], accepted, FinishReason.STOP)
        if count >= round_.room:
            return Outcome(tokens[:count], accepted, FinishReason.LENGTH)
    return Outcome(tokens, accepted)
