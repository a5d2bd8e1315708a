"""Sampled texts of vllm_plugin.py: how many differ, and whether rounding of the logits is the cause.

Both texts are the same before their first difference, and so is the noise G there. One process picked token a and the other b,
each by its own log-probabilities: a by lp(a) / T + G(a) > lp(b) / T + G(b). A difference is explained by the logits if each
pick is right by the log-probabilities which that process reported, so that only these can have made it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from paceline.speculation.verification.noise import NoiseKey, Purpose, gumbel_at

TOP = 20
"""Log-probabilities of a position that are asked for, besides that of the sampled token: as many as vLLM gives."""
SLACK = 1e-3
"""Most by which a float32 log-probability moves a pick."""
HEADER = (
    "| sampled | compared with | texts that differ | explained by the logits | not reported "
    "| lp(a) - lp(b) moved by: median, largest | elsewhere | first differing position | positions before it, of all "
    "| counted |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One batch of sampled texts."""

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[dict[int, float]]]
    """Of each position: raw log-probabilities of the likeliest tokens and the sampled one, by token."""

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> "Sampled":
        """The answers of a process to requests with `logprobs`; keys of JSON are strings."""
        texts = [
            [{int(token): value for token, value in position.items()} for position in text]
            for answer in answers
            for text in answer["logprobs"]
        ]
        return cls([text for answer in answers for text in answer["tokens"]], texts)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two texts of one request differ."""

    position: int
    is_explained: bool
    shift: float | None
    """Change of lp(a) - lp(b) between the processes; None: one of them did not report both."""


def row(
    name: str, other: str, own: Sampled, base: Sampled, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]],
    counted: dict[str, int],
) -> str:  # fmt: skip
    """A row of the table that compares `own` with `base`, the batch `other`. A text is compared up to its first difference:
    what follows is another text."""
    found = differences(own, base, prompts, sampling)
    total = sum(map(len, base.tokens))
    firsts = [one.position for one in found.values()]
    same = total - sum(len(base.tokens[i]) for i in found) + sum(firsts)
    where = f"{min(firsts)} to {max(firsts)}, median {median(firsts):.0f}" if firsts else ""
    shifts = [one.shift for one in found.values() if one.shift is not None]
    explained = f"{sum(one.is_explained for one in found.values())} of {len(found)}" if found else ""
    described = ", ".join(f"{value} {key}" for key, value in counted.items())
    cells = [
        name, other, f"{len(found)} of {len(base.tokens)}", explained, str(len(found) - len(shifts)) if found else "",
        _spread(shifts), _spread(_shifts_elsewhere(own, base, found)), where, f"{same} of {total}", described,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def differences(
    own: Sampled, base: Sampled, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]]
) -> dict[int, Difference]:
    """By request."""
    found = {}
    for i, (text, other) in enumerate(zip(own.tokens, base.tokens, strict=True)):
        if list(text) != list(other):
            at = next(j for j, (b, a) in enumerate(zip(text, other, strict=True)) if a != b)
            found[i] = _difference(
                at, i, own, base, NoiseKey(sampling[i]["seed"], 0, len(prompts[i]) + at), sampling[i]
            )
    return found


def _difference(at: int, i: int, own: Sampled, base: Sampled, key: NoiseKey, sampling: dict[str, Any]) -> Difference:
    a, b = base.tokens[i][at], own.tokens[i][at]
    gaps = [_gap(one.logprobs[i][at], a, b) for one in (base, own)]
    if None in gaps:
        return Difference(at, False, None)
    in_base, in_own = (gap for gap in gaps if gap is not None)
    noise_a, noise_b = gumbel_at([key], Purpose.SHARED, torch.tensor([[a, b]]))[0].tolist()
    needed = sampling["temperature"] * (noise_b - noise_a)
    return Difference(at, in_base > needed - SLACK and in_own < needed + SLACK, abs(in_base - in_own))


def _gap(logprobs: dict[int, float], a: int, b: int) -> float | None:
    return logprobs[a] - logprobs[b] if a in logprobs and b in logprobs else None


def _shifts_elsewhere(own: Sampled, base: Sampled, found: dict[int, Difference]) -> list[float]:
    """Changes between the processes of the gap between the two likeliest tokens, at positions with the same context."""
    shifts = []
    for i, text in enumerate(base.logprobs):
        end = found[i].position if i in found else len(text)
        for one, other in zip(own.logprobs[i][:end], text[:end], strict=True):
            first, second = sorted(other, key=other.__getitem__, reverse=True)[:2]
            gap = _gap(one, first, second)
            if gap is not None:
                shifts.append(abs(gap - other[first] + other[second]))
    return shifts


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f}, {max(values):.3f}" if values else ""
