"""The sweep of benchmarks/gpu.md beside the cost model of the shipped H200 profile, without a GPU.

python benchmarks/profile_sweep.py
"""

import argparse

from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import Speculation
from paceline.planning.simulation.workers.rounds import Rounds

CONTEXT = 345
"""Tokens of a sequence: a prompt of 281 and half of 128."""
MEASURED = {
    1: (244, 509, 0.80, 4.9),
    2: (474, 996, 0.81, 5.2),
    4: (949, 1872, 0.78, 4.9),
    8: (1846, 3659, 0.79, 4.8),
    16: (3555, 6907, 0.82, 3.4),
    32: (6769, 11701, 0.85, 3.3),
    64: (11527, 17888, 0.85, 2.6),
    128: (18755, 22610, 0.87, 1.3),
    256: (26244, 26322, 0.87, 0.0),
}
"""Plain and `goodput` tokens per second, alpha and mean depth by batch: the table of benchmarks/gpu.md. At 256 nothing drafted,
and alpha is that of 128."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    profile = load_profile("h200-8b")
    print("batch   plain  profile  ratio   goodput  profile  ratio   depth  profile")
    for batch, (plain, goodput, alpha, depth) in MEASURED.items():
        rounds = Rounds(profile, Speculation((alpha,)))
        context = batch * CONTEXT
        modelled = batch / profile.verify_seconds(batch, 0, context)
        best = rounds.best(batch, context, batch)
        drafted = batch * best.tokens / (best.seconds + profile.context_seconds.value * context)
        print(
            f"{batch:5}{plain:8}{modelled:9.0f}{modelled / plain:7.2f}{goodput:10}{drafted:9.0f}{drafted / goodput:7.2f}"
            f"{depth:8.1f}{best.depth:9}"
        )


if __name__ == "__main__":
    main()
