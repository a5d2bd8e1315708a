"""Requests that arrive at the times of a trace, in the simulation of `goodput_replay_served.py`: `goodput` against plain
decoding.

    python benchmarks/goodput_replay_open.py --arrivals azure_llm_trace_code.csv

TTFT has 10 ms for HTTP and the host. The ratios are medians over pairs of runs with the same texts. `--beside N` replays
another limit of prompt rows beside which no draft prefill runs and large batches draft nothing.
"""

import argparse
from pathlib import Path
from statistics import median, quantiles

import goodput_replay_served
from goodput_replay_served import Served
from goodput_replay_texts import MS, Run
from trace_arrivals import arrival_times

from paceline.speculation.depth import prompt_load
from paceline.speculation.depth.prompt_load import MANY_ROWS

HOST_MS = 10.0
"""Time of a request outside the engine's steps."""


class Latencies:
    def __init__(self, run: Run, max_ttft: float, max_tpot: float) -> None:
        ttfts = [(text.began - text.arrives) / MS + HOST_MS for text in run.texts]
        cuts = quantiles(ttfts, n=100)
        self.ttft, self.ttft_p99 = cuts[49], cuts[98]
        self.tpot, self.tpot_p99 = run.tpot(50), run.tpot(99)
        met = [ttft <= max_ttft and tpot <= max_tpot for ttft, tpot in zip(ttfts, run.tpots, strict=True)]
        self.good_rate = sum(met) / run.now


def middle(runs: list[Latencies], name: str) -> float:
    return median(getattr(run, name) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=Path, required=True, help="trace")
    parser.add_argument("--loads", default="42:336,68:540,80:640", metavar="RATE:REQUESTS,…")
    parser.add_argument("--beside", type=int, default=MANY_ROWS, metavar="ROWS")
    parser.add_argument("--alpha", type=float, default=0.82, help="mean over sequences")
    parser.add_argument("--spread", type=float, default=0.09, help="deviation of alpha between sequences")
    parser.add_argument("--prefill", type=float, default=2.0, help="time of a draft prefill over its time alone")
    parser.add_argument("--max-ttft", type=float, default=500.0, help="objective, ms")
    parser.add_argument("--max-tpot", type=float, default=25.0, help="objective, ms")
    parser.add_argument("--repeats", type=int, default=12)
    parser.set_defaults(delay=0.0)
    options = parser.parse_args()
    goodput_replay_served.MANY_ROWS = prompt_load.MANY_ROWS = options.beside
    print("| requests/s | TTFT p50 / p99 ms, plain | goodput | p50 / plain | p99 / plain | TPOT p50 / p99 ms, plain | goodput "
          "| within the objective, requests/s, plain | goodput |")  # fmt: skip
    print("|" + "---|" * 9)
    for load in options.loads.split(","):
        rate, _, count = load.partition(":")
        arrivals, served = arrival_times(options.arrivals, int(count), float(rate)), Served(options)
        pairs = [
            [
                Latencies(served.run_open(arrivals, is_on, seed), options.max_ttft, options.max_tpot)
                for is_on in (False, True)
            ]
            for seed in range(options.repeats + 1)
        ][1:]  # the policy learns in the first
        ratios = [median(getattr(on, name) / getattr(off, name) for off, on in pairs) for name in ("ttft", "ttft_p99")]
        offs, ons = [off for off, _ in pairs], [on for _, on in pairs]
        ttfts = [f"{middle(runs, 'ttft'):.0f} / {middle(runs, 'ttft_p99'):.0f}" for runs in (offs, ons)]
        tpots = [f"{middle(runs, 'tpot'):.2f} / {middle(runs, 'tpot_p99'):.2f}" for runs in (offs, ons)]
        good = [f"{middle(runs, 'good_rate'):.1f}" for runs in (offs, ons)]
        print(
            "| " + " | ".join([rate, *ttfts, *(f"{ratio:.2f}" for ratio in ratios), *tpots, *good]) + " |", flush=True
        )


if __name__ == "__main__":
    main()
