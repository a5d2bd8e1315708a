"""Simulated traffic for the choice of a method: `python -m tests.speculation.default_method_simulator` prints its speed."""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from paceline.engine.traffic import DefaultMethod

POOL, MODEL = "pool", "draft_model"
BOTH = (POOL, MODEL)
STEPS = 24
"""Decode steps of a sequence."""


class Traffic:
    """Batches of `load` sequences that start together and decode for `STEPS` steps."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed`: of the tokens that a step commits, 1 to 4 for each sequence; None: always 2."""
        self.choice = DefaultMethod(BOTH)
        self._random = None if seed is None else random.Random(seed)

    def run(
        self, sequences: int, rates: Mapping[str, float], load: int = 1, available: tuple[str, ...] = BOTH
    ) -> list[str]:
        """The method of every batch. `rates`: tokens per second of one sequence."""
        methods = []
        for _ in range(sequences // load):
            method = self.choice.assign(load, load, available)
            methods.append(method)
            for _ in range(STEPS):
                tokens = 2 if self._random is None else self._random.choice((1, 2, 3, 4))
                seconds = (2.0 if self._random is None else 2.5) / rates[method]
                self.choice.observe(method, load, load * tokens, seconds)
        return methods


def changes(methods: Sequence[str]) -> int:
    return sum(one != other for one, other in pairwise(methods))


def main() -> None:
    print("| difference of the methods | of the better one |\n|---|---|")
    for gain in (0.05, 0.1, 0.2, 0.4):
        rates = {POOL: 1.0, MODEL: 1.0 + gain}
        reached = [fmean(rates[one] for one in Traffic(seed).run(500, rates)) / (1.0 + gain) for seed in range(40)]
        print(f"| {gain:.0%} | {fmean(reached):.3f}x ({min(reached):.3f}) |")


if __name__ == "__main__":
    main()
