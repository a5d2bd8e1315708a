"""Runs of planner_fidelity.py: what was measured, the same requests in the simulator, the fit, and the table."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from planner_fidelity_servers import Answer

from paceline.planning.profiles.curve import Curve, Figure
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import SimulationConfig, Speculation
from paceline.planning.simulation.result import Quantiles, quantile
from paceline.planning.simulation.simulation import simulate
from paceline.planning.simulation.text_fit import TextRounds, fit_texts
from paceline.planning.simulation.texts import kinds_of_texts, pooled_alphas
from paceline.planning.traces.trace import Trace, TraceRequest

FIT_ROUNDS = 4
SEEDS = 20
"""Simulations of a run with drafts: the acceptance of every text is drawn. The figures are means."""
MIN_TESTED = 20
"""Rounds from which the acceptance at a position is used."""
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """Requests that were answered, in their order."""

    rate: float | None
    """Requests per second. None in a closed loop."""
    streams: int | None
    requests: Sequence[tuple[float, int, int]]
    """Time of arrival, prompt tokens and output tokens. Of the times of a closed loop, only those of the first request of each
    stream are used."""
    ttft: Sequence[float]
    tpot: Sequence[float]
    tokens: int
    seconds: float
    load: float
    """Load average of the machine."""
    rounds: Sequence[Sequence[int]]
    """Of each request, rounds with drafts by the number of accepted ones."""

    @classmethod
    def of(cls, answers: Sequence[Answer], rate: float | None = None, streams: int | None = None) -> "Run":
        failed = [one.error for one in answers if one.error]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0]}")
        return cls(
            rate,
            streams,
            [(one.arrival.time, len(one.arrival.prompt), one.arrival.output_tokens) for one in answers],
            [one.ttft for one in answers],
            [one.tpot for one in answers],
            sum(len(one.tokens) for one in answers),
            max(one.last for one in answers),
            os.getloadavg()[0],
            [one.rounds for one in answers],
        )

    @property
    def case(self) -> tuple[float, str]:
        """What the run is compared under: a number to sort by, and its name."""
        if self.streams is not None:
            return self.streams, f"{self.streams} streams, {len(self.requests)} requests"
        assert self.rate is not None
        return self.rate, f"{self.rate:g} requests/s"

    @property
    def ramp_seconds(self) -> float:
        """Mean time between the first requests of two streams; 0: the run has none."""
        first = sorted(arrival for arrival, _, _ in self.requests[: self.streams or 0])
        return (first[-1] - first[0]) / (len(first) - 1) if len(first) > 1 else 0.0

    @property
    def figures(self) -> Figures:
        return _figures(self.ttft, self.tpot, self.tokens / self.seconds)


def append(run: Run, path: Path) -> None:
    """Add a line to the file, and print the figures."""
    with path.open("a") as lines:
        lines.write(json.dumps(asdict(run)) + "\n")
    shown = ", ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
    print(f"{path.stem}: {run.case[1]}: {shown}; load average {run.load:.1f}", flush=True)


def read(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Setting:
    """The measured cluster, as the simulator needs it."""

    workers: int = 1
    max_depth: int = 0
    rule: Literal["fixed", "policy"] = "fixed"
    drafted: tuple[float, ...] = ()
    """Share of the rounds of the fit that drafted each position; empty: no drafts."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Setting":
        document = json.loads(path.read_text())
        return cls(**{**document, "drafted": tuple(document["drafted"])})

    def speculation(self, fit: Sequence[Run]) -> Speculation | None:
        """Drafts with the acceptance of the texts of the fit; None: no drafts."""
        texts = [text_rounds(rounds, self.drafted) for run in fit for rounds in run.rounds]
        tested = [sum(text.tested[at] for text in texts) for at in range(len(self.drafted))]
        positions = next((at for at, count in enumerate(tested) if count < MIN_TESTED), len(tested))
        if not positions:
            return None
        kept = [TextRounds(text.tested[:positions], text.accepted[:positions]) for text in texts]
        alphas, spread = fit_texts(kept)
        return Speculation(alphas, self.max_depth, self.rule, spread)


def alike(speculation: Speculation) -> Speculation:
    """The same mean tokens of a round, from texts that do not differ."""
    kinds = kinds_of_texts(speculation.alphas, speculation.spread)
    return replace(speculation, alphas=pooled_alphas(kinds, len(speculation.alphas)), spread=0.0)


def text_rounds(rounds: Sequence[int], drafted: Sequence[float]) -> TextRounds:
    """Drafts of a text by position. Of its rounds that accepted one position, as many drafted the next as of all rounds."""
    tested, accepted, reached, before = [], [], float(sum(rounds)), 1.0
    for position, share in enumerate(drafted, start=1):
        kept = float(sum(rounds[position:]))
        tested.append(max(kept, reached * share / before))
        accepted.append(kept)
        reached, before = kept, share
    return TextRounds(tuple(tested), tuple(accepted))


def simulated(config: SimulationConfig, run: Run, gateway: float) -> list[Figures]:
    """Figures of the same requests in the simulator, for each seed. `gateway`: seconds that are added to every TTFT."""
    trace = Trace("fidelity", tuple(TraceRequest(*one) for one in run.requests))
    found: list[Figures] = []
    for seed in range(SEEDS if config.speculation else 1):
        result = simulate(replace(config, streams=run.streams, seed=seed), trace)
        jobs = result.jobs
        waits = 1.0 if run.streams is None else len(jobs) / run.streams  # of one stream, one after the other
        rate = sum(job.output_tokens for job in jobs) / (result.seconds + waits * gateway)
        found.append(_figures([job.ttft + gateway for job in jobs], [job.tpot for job in jobs], rate))
    return found


def mean(figures: Sequence[Figures]) -> Figures:
    return {name: fmean(one[name] for one in figures) for name in figures[0]}


def _figures(ttft: Sequence[float], tpot: Sequence[float], rate: float) -> Figures:
    first, each = Quantiles.of(ttft), Quantiles.of(tpot)
    return {
        "TTFT mean, ms": 1e3 * first.mean,
        "TTFT p99, ms": 1e3 * first.p99,
        "TPOT mean, ms": 1e3 * each.mean,
        "TPOT p99, ms": 1e3 * each.p99,
        "tokens/s": rate,
    }


def scaled(profile: WorkerProfile, factor: float) -> WorkerProfile:
    """The profile with all times of steps multiplied."""

    def more(value: object) -> object:
        if isinstance(value, Curve):
            return replace(value, points=tuple((count, factor * seconds) for count, seconds in value.points))
        assert isinstance(value, Figure)
        return replace(value, value=factor * value.value)

    kept = ("start_seconds", "round_trip_seconds")
    names = [one.name for one in fields(profile) if one.name.endswith("_seconds") and one.name not in kept]
    return replace(profile, **{name: more(value) for name in names if (value := getattr(profile, name)) is not None})


def fitted(profile: WorkerProfile, runs: Sequence[Run], simulate_run: Callable[..., Figures]) -> tuple[float, float]:
    """The factor on the times of the profile, and the seconds of the gateway."""

    def real(name: str) -> float:
        return fmean(run.figures[name] for run in runs)

    def sim(factor: float, name: str) -> float:
        return fmean(simulate_run(scaled(profile, factor), run, 0.0)[name] for run in runs)

    factor = 1.0
    for _ in range(FIT_ROUNDS):
        factor *= real("TPOT mean, ms") / sim(factor, "TPOT mean, ms")
    return factor, (real("TTFT mean, ms") - sim(factor, "TTFT mean, ms")) / 1e3


def print_report(
    setting: Setting, profile: WorkerProfile, fit: Sequence[Run], runs: Sequence[Run], texts_alike: bool = False
) -> None:
    """`texts_alike`: simulate texts that do not differ in acceptance."""
    speculation = setting.speculation(fit)
    if speculation is not None and texts_alike:
        speculation = alike(speculation)

    ramp = fmean(run.ramp_seconds for run in fit)
    cluster = SimulationConfig(profile, setting.workers, 0, speculation, "least_loaded", "stepwise", ramp_seconds=ramp)

    def simulate_run(own: WorkerProfile, run: Run, gateway: float) -> list[Figures]:
        return simulated(replace(cluster, profile=own), run, gateway)

    factor, gateway = fitted(profile, fit, lambda own, run, seconds: mean(simulate_run(own, run, seconds)))
    added = f"gateway {1e3 * gateway:.1f} ms, a stream every {1e3 * ramp:.2f} ms"
    print(f"fit: times x {factor:.3f}, {added}; {described(speculation)}\n")
    print("| load | figure | real, mean | real, runs | simulated / real | fitted: simulated / real | seeds | goal |")
    print("|---|---|---|---|---|---|---|---|")
    cases: defaultdict[tuple[float, str], list[Run]] = defaultdict(list)
    for run in runs:
        cases[run.case].append(run)
    for (_, case), some in sorted(cases.items()):
        measured = mean(simulate_run(profile, some[0], 0.0))
        by_seed = simulate_run(scaled(profile, factor), some[0], gateway)
        for name, value in mean(by_seed).items():
            values = [run.figures[name] for run in some]
            real = fmean(values)
            goal, inside = 0.15 if "p99" in name else 0.05, min(values) <= value <= max(values)
            verdict = "met" if abs(value / real - 1.0) <= goal else "within the runs" if inside else "missed"
            spread = f"{min(values):.4g} to {max(values):.4g} ({len(values)})"
            ratios = f"{measured[name] / real:.3f} | {value / real:.3f} | {middle(by_seed, name, real)}"
            print(f"| {case} | {name} | {real:.4g} | {spread} | {ratios} | {goal:.0%}: {verdict} |")


def middle(figures: Sequence[Figures], name: str, real: float) -> str:
    """The middle 80% of the seeds, over the real figure."""
    ordered = sorted(one[name] / real for one in figures)
    return f"{quantile(ordered, 0.1):.2f} to {quantile(ordered, 0.9):.2f}" if len(ordered) > 1 else "-"


def described(speculation: Speculation | None) -> str:
    if speculation is None:
        return "no drafts"
    return f"alphas {', '.join(f'{alpha:.3f}' for alpha in speculation.alphas)}, spread {speculation.spread:.2f}"
