"""Published tables beside the simulator: routing, throughput and cost, drafts, planning; and where a draft pool pays.

python benchmarks/planner/source_tables.py [routing|throughput|drafts|planner|map]... [--plot FILE.png]

Profiles of the published hardware are rooflines: a pass takes the longer of reading the weights and of its arithmetic.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from paceline.cluster.cost.cost import expected_tokens
from paceline.planning.profiles.curve import Curve, Figure
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import SimulationConfig, Speculation
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import SimulationReport, summarize
from paceline.planning.simulation.simulation import simulate
from paceline.planning.simulation.workers.rounds import Rounds
from paceline.planning.sizing.candidate import Limits
from paceline.planning.sizing.placement import placements
from paceline.planning.sizing.plan import plan
from paceline.planning.traces.synthetic import Traffic, synthesize
from paceline.planning.traces.trace import Trace

H200 = load_profile("h200-8b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
PARAMETERS = 70e9


def assumed(value: float) -> Figure:
    return Figure(value, "assumed", "benchmarks/planner/source_tables.py")


def roofline(name: str, gpus: int, bandwidth: float, flops: float, price: float, draft_ms: float) -> WorkerProfile:
    """A 70B target with 8-bit weights, at 70% of the bandwidth and 60% of the arithmetic of each GPU, both per second."""
    reading = PARAMETERS / (gpus * bandwidth * 0.7)
    row = 2.0 * PARAMETERS / (gpus * flops * 0.6)
    points = tuple((rows, max(reading, rows * row)) for rows in ROWS)
    return replace(
        H200,
        name=name,
        pass_seconds=Curve(points, "assumed"),
        prompt_seconds=None,
        context_seconds=assumed(327_680 / (gpus * bandwidth * 0.7)),
        prompt_context_seconds=assumed(0.0),
        draft_seconds=Curve(((1, draft_ms / 1e3), (64, draft_ms / 1e3)), "assumed"),
        draft_prefill_seconds=assumed(0.0),
        price_per_hour=assumed(price),
        max_num_seqs=assumed(256),
        kv_tokens=assumed(400_000),
    )


def head(title: str, columns: str) -> None:
    """Print the head of a table; `columns` are separated by |."""
    print(f"\n## {title}\n\n| {columns} |\n|" + "---|" * (columns.count("|") + 1))


def report(config: SimulationConfig, trace: Trace, objective: Objective | None = None) -> SimulationReport:
    return summarize(simulate(config, trace), objective or Objective())


def steady(streams: int) -> Trace:
    """Answers of 512 tokens, short prompts."""
    return synthesize(Traffic(streams * 2.0, 32, 512, spread=0.0), 4.0 if streams > 1 else 8.0)


def routing() -> None:
    head(
        "Routing: 8 workers, a system prompt of 3,072 tokens and 200 more",
        "load | router | hit rate | p50 TTFT, ms | p99 TTFT, ms | utilisation",
    )
    print("| published | round-robin | 12.5% | 48 | 85 | 72% |\n| published | KV-aware | 92% | 12 | 35 | 18% |")
    small = replace(H200, kv_tokens=assumed(40_000.0))
    cases = (
        ("one system prompt, 40/s", H200, Traffic(40.0, 3272, 50, prefix_tokens=3072)),
        ("64 system prompts, a cache holds 8 to 12, 25/s", small, Traffic(25.0, 3272, 20, 0.2, 3072, 64)),
    )
    for name, profile, traffic in cases:
        trace = synthesize(traffic, 60.0)
        for router in ("round_robin", "least_loaded", "kv_aware"):
            one = report(SimulationConfig(profile, 8, router=router), trace)
            times = f"{1e3 * one.ttft.p50:.1f} | {1e3 * one.ttft.p99:.1f}"
            print(f"| {name} | `{router}` | {one.hit_rate:.1%} | {times} | {one.utilisation:.0%} |")


A100, H100, A10G = (2.0e12, 312e12), (3.35e12, 990e12), 1.44
"""Bytes and FLOP per second; dollars per hour of a draft GPU that the published costs imply."""
PUBLISHED = (
    ("70B, 4 A100", 5120, 12.5, 0.65, "a100", None, 0.0, 0),
    ("+ 7B, K=5, 4 A10G", 9850, 6.8, 0.50, "a100", 0.75, 2.1, 4),
    ("+ 1B, K=7, 1 A10G", 12400, 5.4, 0.37, "a100", 0.82, 0.8, 1),
    ("+ EAGLE, K=5", 11200, 5.9, 0.32, "a100", 0.78, 0.5, 0),
    ("70B, 4 H100", 7840, 8.2, 0.35, "h100", None, 0.0, 0),
)
"""Name, tok/s, ms per token, dollars per million, target, alpha, ms of a draft step, draft GPUs."""


def throughput() -> None:
    head(
        "Throughput and cost of a 70B, 64 sequences (published) and ours by the number of sequences",
        "cluster | published tok/s | ms/token | $/M | ours at 64: tok/s | ms/token | $/M | depth | at 1: ms/token | speed-up",
    )
    single: dict[str, float] = {}
    for name, rate, latency, dollars, kind, alpha, draft_ms, gpus in PUBLISHED:
        bandwidth, flops = A100 if kind == "a100" else H100
        price = 11.98 if kind == "a100" else 9.88
        profile = replace(
            roofline(kind, 4, bandwidth, flops, price, draft_ms or 1.0),
            draft_price_per_hour=assumed(A10G * max(1, gpus)),
        )
        speculation = Speculation((alpha,), 8) if alpha else None
        config = SimulationConfig(profile, 1, 1 if gpus else 0, speculation)
        many, one = (report(replace(config, streams=n), steady(n)) for n in (64, 1))
        depth = (
            Rounds(profile, speculation, config.profile.round_trip_seconds.value if gpus else 0.0)
            .best(64, 64 * 300, 64)
            .depth
        )
        single.setdefault(kind, one.tpot.mean)
        ours = f"{many.tokens_per_second:,.0f} | {1e3 * many.tpot.mean:.1f} | {many.dollars_per_million:.2f} | {depth}"
        alone = f"{1e3 * one.tpot.mean:.1f} | {single[kind] / one.tpot.mean:.2f}x"
        print(f"| {name} | {rate:,} | {latency} | {dollars:.2f} | {ours} | {alone} |")


def drafts() -> None:
    head(
        "Draft methods for a 70B target: published, and ours for one sequence (verify 15 ms)",
        "method | draft, ms | alpha | published | best K by formula | speed-up by formula | simulated, one sequence",
    )
    table = (
        ("7B model", 2.1, 0.75, 2.2),
        ("1.3B distilled", 0.8, 0.82, 2.8),
        ("n-gram heads", 0.3, 0.65, 2.0),
        ("layer skip", 5.2, 0.88, 2.1),
        ("EAGLE", 0.5, 0.78, 2.7),
    )
    trace, verify = steady(1), 15.0
    target = replace(
        H200,
        pass_seconds=Curve(((1, verify / 1e3), (64, verify / 1e3)), "assumed"),
        prompt_seconds=None,
        context_seconds=assumed(0.0),
    )
    plain = report(SimulationConfig(target, streams=1), trace).tpot.mean
    for name, draft_ms, alpha, published in table:
        speed = {k: expected_tokens((alpha,), k) * verify / (k * draft_ms + verify) for k in range(1, 17)}
        depth = max(speed, key=lambda k: speed[k])
        profile = replace(
            target, draft_seconds=Curve(((1, draft_ms / 1e3),), "assumed"), draft_prefill_seconds=assumed(0.0)
        )
        one = report(SimulationConfig(profile, 1, 0, Speculation((alpha,), 16), streams=1), trace)
        print(
            f"| {name} | {draft_ms} | {alpha} | {published}x | {depth} | {speed[depth]:.2f}x | {plain / one.tpot.mean:.2f}x |"
        )


def planner() -> None:
    """The published rule: ceil(tokens per second / tokens per second of a GPU) for each role, one more for TTFT."""
    head(
        "The published planner's rule, and the plan: p99 TTFT 500 ms, p99 TPOT 50 ms, profile h200-8b",
        "load | rule: prefill + decode | $/h | requests in the objective | our plan | $/h | in the objective",
    )
    objective = Objective(0.5, 0.05, 0.99)
    prefill_rate = 512 / H200.pass_seconds.at(512)
    decode_rate = 64 / H200.verify_seconds(64, 0, 64 * 2000)
    for rate, prompt, output in ((20.0, 2000, 200), (60.0, 2000, 200), (60.0, 500, 500)):
        trace = synthesize(Traffic(rate, prompt, output), 60.0)
        prefills = math.ceil(rate * prompt / prefill_rate)
        decodes = math.ceil(rate * output / decode_rate)
        ruled = report(SimulationConfig(H200, decodes, prefill_workers=prefills), trace, objective)
        chosen = plan(H200, trace, objective, Limits(32), Speculation((0.8,)))
        dollars = (prefills + decodes) * H200.price_per_hour.value
        print(
            f"| {rate:g}/s, {prompt} + {output} tokens | {prefills} + {decodes} | {dollars:.2f} | {ruled.attainment:.1%} "
            f"| {chosen.choice.candidate} | {chosen.choice.candidate.dollars_per_hour:.2f} | {chosen.choice.attainment:.1%} |"
        )


BATCHES, ALPHAS, RATIOS = (1, 4, 16, 64, 128, 256), (0.5, 0.6, 0.7, 0.8, 0.9), (0.05, 0.1, 0.3, 1.0)


def cheapest(batch: int, alpha: float, ratio: float) -> tuple[str, float]:
    """The planner's placement for targets with `batch` sequences each, and dollars relative to plain decoding."""
    profile = replace(H200, draft_price_per_hour=assumed(ratio * H200.price_per_hour.value))
    best = placements(profile, Speculation((alpha,), 8), batch, batch * 500)[0]
    name = f"pool 1:{best.targets_per_draft}" if best.placement == "pool" else best.placement
    return name, best.cost


def draw_map(plot: Path | None) -> None:
    print("\n## Where a draft pool pays: cheapest way to draft, and its cost per token relative to plain decoding\n")
    print("Rows: alpha. Columns: sequences of a target. `pool 1:n` is one draft worker for n targets.")
    for ratio in RATIOS:
        print(f"\nA draft GPU costs {ratio:g} of a target GPU:\n")
        print("| alpha | " + " | ".join(map(str, BATCHES)) + " |\n|---|" + "---|" * len(BATCHES))
        for alpha in ALPHAS:
            cells = [cheapest(batch, alpha, ratio) for batch in BATCHES]
            print(f"| {alpha} | " + " | ".join(f"{name}, {cost:.2f}" for name, cost in cells) + " |")
    if plot is not None:
        _plot(plot)


def _plot(path: Path) -> None:
    from paceline.bench.plots import load_pyplot

    pyplot = load_pyplot()
    kinds = {"none": 0, "device": 1, "pool": 2}
    figure, axes = pyplot.subplots(1, len(RATIOS), figsize=(15, 3.6), layout="constrained", sharey=True)
    for one, ratio in zip(axes, RATIOS, strict=True):
        grid = [[cheapest(batch, alpha, ratio) for batch in BATCHES] for alpha in ALPHAS]
        one.imshow(
            [[kinds[name.split()[0]] for name, _ in row] for row in grid], cmap="Blues", vmin=0, vmax=3, origin="lower"
        )
        for y, row in enumerate(grid):
            for x, (name, cost) in enumerate(row):
                one.text(x, y, f"{name.removeprefix('pool ')}\n{cost:.2f}", ha="center", va="center", fontsize=7)
        one.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
        one.set_yticks(range(len(ALPHAS)), [str(alpha) for alpha in ALPHAS])
        one.set_xlabel("sequences of a target")
        one.set_title(f"draft GPU at {ratio:g} of the target's price", fontsize=9)
    axes[0].set_ylabel("alpha")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"routing": routing, "throughput": throughput, "drafts": drafts, "planner": planner}
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join([*tables, "map"]))
    parser.add_argument("--plot", type=Path, help="draw the map")
    options = parser.parse_args()
    wanted = options.tables or [*tables, "map"]
    for name in wanted:
        if name == "map":
            draw_map(options.plot)
        else:
            tables[name]()


if __name__ == "__main__":
    main()
