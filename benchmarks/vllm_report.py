"""Tables of vllm_plugin.py."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from vllm_rounds import NEW, NEXT, REPEATED, Run, Tokens

HEADER = (
    "| sequences | contender | tok/s, median | min to max | / plain | / plain_sync | texts that differ | counted |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Outcome(NamedTuple):
    """One run of one contender."""

    group: str
    index: int
    size: int
    contender: str
    seconds: float
    tokens: Tokens
    counted: dict[str, int]
    """Steps, drafted and accepted tokens, microseconds of the plugin, and prompt tokens found in the prefix cache."""

    @classmethod
    def of(cls, run: Run, contender: str, answer: dict[str, Any]) -> "Outcome":
        seconds, tokens, counted = answer["seconds"], answer["tokens"], answer["counted"]
        return cls(run.group, run.index, len(run.prompts), contender, seconds, tokens, counted)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def tables(outcomes: Sequence[Outcome]) -> str:
    """A table of each group of prompts. Ratios compare medians. Texts are compared with those of plain_sync, else of plain."""
    parts = []
    for group in (NEW, NEXT, REPEATED):
        keys = list(dict.fromkeys((one.size, one.contender) for one in outcomes if one.group == group))
        keys.sort(key=lambda key: key[0])
        rows = [_row(outcomes, group, *key) for key in keys]
        if rows:
            parts.append("\n".join([f"{group[0].upper()}{group[1:]}:\n", HEADER, *rows]))
    return "\n\n".join(parts)


def _row(outcomes: Sequence[Outcome], group: str, size: int, contender: str) -> str:
    own = _select(outcomes, group, size, contender)
    rates = [one.rate for one in own]
    ratios = []
    for base in ("plain", "plain_sync"):
        others = _base(outcomes, own, base)
        ratios.append(f"{median(rates) / median([one.rate for one in others]):.2f}" if others else "")
    texts = _base(outcomes, own, "plain_sync") or _base(outcomes, own, "plain")
    by_index = {one.index: one.tokens for one in texts}
    compared = [one for one in own if one.index in by_index]
    same = [a == b for one in compared for a, b in zip(one.tokens, by_index[one.index], strict=True)]
    differing = f"{same.count(False)} of {len(same)}" if same else ""
    total: Counter[str] = Counter()
    for one in own:
        total.update(one.counted)
    counted = ", ".join(f"{value} {key}" for key, value in total.items())
    spread = f"{min(rates):.0f} to {max(rates):.0f}"
    return f"| {size} | {contender} | {median(rates):.0f} | {spread} | {' | '.join(ratios)} | {differing} | {counted} |"


def _base(outcomes: Sequence[Outcome], own: Sequence[Outcome], base: str) -> list[Outcome]:
    """Runs of `base` with the prompts of `own`: of the same group, or those of new prompts if it repeats none."""
    group, indices = own[0].group, {one.index for one in own}
    found = _select(outcomes, group, own[0].size, base)
    if group == REPEATED and not found:
        found = _select(outcomes, NEW, own[0].size, base)
    return [one for one in found if one.index in indices]


def _select(outcomes: Sequence[Outcome], group: str, size: int, contender: str) -> list[Outcome]:
    return [o for o in outcomes if (o.group, o.size, o.contender) == (group, size, contender)]
