"""The measured runs of one H200 next to the simulator with the profile `h200-8b`, without a GPU.

    python benchmarks/planner/planner_fidelity_h200.py PROMPTS.jsonl    # closed loops, plain decoding, in the simulator
    python benchmarks/planner/planner_fidelity_h200.py                  # the sweep of batches, by the cost model alone

PROMPTS is Spec-Bench's spec_bench_dev.jsonl. The figures of the GPU are those of benchmarks/vllm/README.md (over HTTP) and
of benchmarks/gpu/README.md (inside one process, and the sweep). Requests are taken in the order of the file, and every stream
sends its next one when a text ends.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.planning.profile import ProfileValue, load_profile
from paceline.planning.simulator.result import quantile
from paceline.planning.simulator.rounds import Rounds
from paceline.planning.simulator.settings.config import SimulationConfig, Speculation
from paceline.planning.simulator.simulation import simulate
from paceline.planning.traces.trace import Trace, TraceRequest

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
"""Plain and `goodput` tokens per second, alpha and mean depth by batch: the table of benchmarks/gpu/README.md. At 256 nothing
drafted, and alpha is that of 128."""


PROFILE = replace(load_profile("h200-8b"), kv_tokens=ProfileValue(160_000, "assumed", "setting of the measured runs"))
OUTPUT_TOKENS, MAX_CHARACTERS = 128, 4000
NAMES = ("tok/s", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms")


@dataclass(frozen=True, slots=True)
class Measured:
    streams: int
    requests: int
    figures: tuple[float | None, ...]
    """In the order of `NAMES`; None if it was not published."""
    runs: tuple[float, float] | None = None
    """Lowest and highest tok/s of single runs."""


HTTP = (
    Measured(1, 6, (248, 9, 10, 3.99, 4.02), (248, 248)),
    Measured(8, 40, (1859, 21, 45, 4.14, 4.33), (1856, 1861)),
    Measured(32, 128, (4977, 84, 265, 5.00, 7.76), (4960, 5038)),
    Measured(64, 256, (7807, 180, 618, 5.86, 10.17), (7800, 7836)),
    Measured(128, 384, (10013, 277, 819, 10.98, 12.06), (9901, 10036)),
    Measured(256, 640, (11671, 628, 1558, 15.33, 20.23), (11575, 11744)),
)
INSIDE = (
    Measured(128, 288, (9574, 170, 764, None, 11.25)),
    Measured(256, 544, (11585, 335, 1520, None, 19.80)),
)


def prompt_lengths(path: Path) -> list[int]:
    tokenizer = load_tokenizer("smollm2")
    template = ChatTemplate.of(tokenizer)
    texts = [json.loads(line)["turns"][0][:MAX_CHARACTERS] for line in path.read_text().splitlines()]
    chats = [template.render([{"role": "user", "content": text}]) for text in texts]
    return [len(tokenizer.encode(chat, add_special=False)) for chat in chats]


def simulated(lengths: Sequence[int], run: Measured) -> list[float]:
    """The figures of `NAMES`."""
    requests = [TraceRequest(0.0, lengths[i % len(lengths)], OUTPUT_TOKENS) for i in range(run.requests)]
    config = SimulationConfig(PROFILE, mode="stepwise", streams=run.streams)
    result = simulate(config, Trace("fidelity", tuple(requests)))
    ttft, tpot = (sorted(getattr(job, name) for job in result.jobs) for name in ("ttft", "tpot"))
    rate = sum(job.output_tokens for job in result.jobs) / result.seconds
    return [rate, *(1e3 * quantile(some, share) for some in (ttft, tpot) for share in (0.5, 0.99))]


def verdict(name: str, value: float, real: float, run: Measured) -> str:
    goal = 0.15 if "p99" in name else 0.05
    if abs(value / real - 1.0) <= goal:
        return f"{goal:.0%}: met"
    if name == "tok/s" and run.runs is not None and run.runs[0] <= value <= run.runs[1]:
        return f"{goal:.0%}: within the runs"
    return f"{goal:.0%}: missed"


def print_table(title: str, lengths: Sequence[int], runs: Sequence[Measured]) -> None:
    print(f"\n{title}\n\n| streams | figure | real | simulated | simulated / real | goal |\n|---|---|---|---|---|---|")
    for run in runs:
        for name, value, real in zip(NAMES, simulated(lengths, run), run.figures, strict=True):
            if real is not None:
                shown = f"{real:g} | {value:.5g} | {value / real:.3f} | {verdict(name, value, real, run)}"
                print(f"| {run.streams} | {name} | {shown} |", flush=True)


def print_sweep() -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", help="JSON lines with a list `turns`; without them, the sweep")
    prompts = parser.parse_args().prompts
    if prompts is None:
        print_sweep()
        return
    lengths = prompt_lengths(prompts)
    print(f"{len(lengths)} prompts, {fmean(lengths):.0f} tokens on average")
    print_table("Inside one process, plain", lengths, INSIDE)
    print_table("Over HTTP, plain", lengths, HTTP)


if __name__ == "__main__":
    main()
