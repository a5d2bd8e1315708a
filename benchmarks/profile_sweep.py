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
    1: (254, 519, 0.80, 5.0),
    2: (502, 1010, 0.82, 3.2),
    4: (996, 1901, 0.78, 5.0),
    8: (1941, 3712, 0.79, 5.2),
    16: (3522, 6805, 0.81, 3.7),
    32: (6778, 11928, 0.85, 4.0),
    64: (11465, 16594, 0.85, 3.0),
    128: (18365, 23520, 0.86, 1.6),
    256: (26300, 26318, 0.86, 0.0),
}
"""Plain and `goodput` tokens per second, alpha and mean depth by batch: the table of benchmarks/gpu.md."""


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
