"""The target's own tokens from log-probabilities, and the accepted part of a draft."""

import math
from collections.abc import Mapping, Sequence

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.endpoints.endpoint import Outcome, Round
from paceline.endpoints.noise import gumbel

MAX_TOP = 20
"""Alternatives that servers report for one token unless configured otherwise."""


def refuse_processed(sampling: SamplingParams, kind: str) -> str | None:
    """Why raw log-probabilities do not determine `p` with these parameters; None: they do."""
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
    """argmax(log p + G) over the most likely tokens {id: log-probability}; greedy: the most likely one, at a tie the lowest id.

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


def accept(round_: Round, picks: Sequence[int]) -> Outcome:
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
