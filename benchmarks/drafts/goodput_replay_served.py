"""Streams under continuous load in a simulation, without a GPU: `goodput` against plain decoding, with costs of an H200.

    python benchmarks/drafts/goodput_replay_served.py
    python benchmarks/drafts/goodput_replay_served.py --whole
    python benchmarks/drafts/goodput_replay_served.py --arrivals azure_llm_trace_code.csv [--prompt-rows ROWS]

Every stream sends its next prompt when its text ends; `--whole`: every stream has one text. Prompts are computed in steps that
decode, by the rule of the engine. A draft prefill runs with a step, and its sequence drafts from the next step on. The
policy observes a step after it has decided the next one, as in the engine. The last columns are shares of the time of
`goodput`, and of its steps for baselines; a probe counts with the time that it adds.

With `--arrivals` requests arrive at the times of a trace, and TTFT has 10 ms for HTTP and the host. Ratios are medians over
pairs of runs with the same texts. `--prompt-rows` sets the prompt rows from which on no draft prefill runs and large batches
draft nothing.
"""

import argparse
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles

from paceline.core.traffic import TrafficClass
from paceline.engine.graph.chain_drafter import MAX_FOLLOWED_ROUNDS
from paceline.planning.traces.trace_files import load_trace
from paceline.policy.cost.curve import LinearCost
from paceline.policy.depth import prompt_load
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.depth.probing import SEQUENCES as PROBED
from paceline.policy.depth.prompt_load import may_draft_with_prompts
from paceline.policy.step import padded_size, prompt_budget

MS = 1e-3
PASSES = {
    1: 3.97, 8: 4.10, 16: 4.39, 32: 4.39, 64: 4.39, 128: 5.16, 256: 6.99, 384: 8.95, 512: 10.6, 640: 13.0, 768: 15.5,
    1024: 19.6, 1536: 30.4, 2048: 40.4, 4096: 79.2, 8192: 154.9,
}  # fmt: skip
"""Milliseconds of a pass by rows, without attention to contexts, of the 8B shape."""
PER_TOKEN = 28e-9
"""Seconds per token of context in a pass."""
DRAFTS = {1: 0.59, 2: 0.63, 4: 0.64, 8: 0.68, 16: 0.82, 32: 1.03, 64: 1.03, 128: 1.24, 256: 1.4}
"""Milliseconds of a draft step by sequences; the last one is assumed."""
DRAFT_PREFILL = 1.03e-6
"""Seconds per token of a draft prefill alone."""
MIXED = 0.5 * MS
"""Time that prompts add to the pass of a step."""
PROMPTS = (40, 60, 80, 100, 200, 300, 600, 900)
MAX_DEPTH, MAX_DRAFT_TOKENS, MAX_GAP, TOKENS, TRAFFIC = 8, 512, 8192, 128, TrafficClass("draft", "chat")
EARLY_TOKENS, EARLY_ALPHA = 12, 0.96


def interpolate(points: dict[int, float], at: float) -> float:
    sizes, values = [*points], [*points.values()]
    i = min(max(1, bisect_left(sizes, at)), len(sizes) - 1)
    share = (at - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return (values[i - 1] + (values[i] - values[i - 1]) * share) * MS


@dataclass(eq=False)
class Text:
    id: int
    prompt: int
    alpha: float
    arrives: float
    computed: int = 0
    made: int = 0
    cached: int = 0
    """Tokens in the draft's cache."""
    is_current: bool = False
    has_drafted: bool = False
    began: float = 0.0
    ended: float = 0.0

    @property
    def size(self) -> int:
        return self.prompt + self.made

    @property
    def limit(self) -> int:
        return max(0, min(MAX_DEPTH, TOKENS - self.made - 1))


@dataclass
class Run:
    now: float = 0.0
    texts: list[Text] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "drafts", "probes"), 0.0))

    num_baselines: int = 0

    @property
    def rate(self) -> float:
        return TOKENS * len(self.texts) / self.now

    @property
    def tpots(self) -> list[float]:
        return [(text.ended - text.began) / (TOKENS - 1) / MS for text in self.texts]

    def tpot(self, percent: int) -> float:
        return quantiles(self.tpots, n=100)[percent - 1] if len(self.texts) > 1 else self.tpots[0]


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


class Served:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        padded = PaddedBatch(frozenset({"draft"}), padded_size, lambda depth: depth, MAX_DRAFT_TOKENS)
        self.policy = GoodputDepth(MAX_DEPTH, padded=[padded])
        self.policy.calibrate({1 << n: interpolate(PASSES, 1 << n) for n in range(11)}, PER_TOKEN)
        lines = {size: LinearCost(0.0, seconds * MS) for size, seconds in DRAFTS.items()}
        self.policy.calibrate_drafts("draft", lines, DRAFT_PREFILL)
        self._next_id, self._is_baseline = 0, False

    def run(self, streams: int, requests: int, is_on: bool, seed: int) -> Run:
        self._numbers = iter(range(requests))
        return self._run([0.0] * streams, is_on, seed)

    def run_open(self, arrivals: Sequence[float], is_on: bool, seed: int) -> Run:
        self._numbers = iter(range(len(arrivals)))
        return self._run(arrivals, is_on, seed)

    def _run(self, arrivals: Sequence[float], is_on: bool, seed: int) -> Run:
        self.dice = random.Random(seed)
        run, waiting, running = Run(), [], []
        for when in arrivals:
            self._arrive(waiting, when, seed)
        self._num_plain, self._observed = MAX_FOLLOWED_ROUNDS + 1, None
        while waiting or running:
            if not running and all(text.arrives > run.now for text in waiting):
                run.now = min(text.arrives for text in waiting)
            self._step(run, waiting, running, is_on)
            for text in [text for text in running if text.made >= TOKENS]:
                running.remove(text)
                text.ended = run.now
                run.texts.append(text)
                self._arrive(waiting, run.now + self.dice.uniform(0.0, self.options.delay) * MS, seed)
        if self._observed is not None:
            self.policy.observe(self._observed)
        return run

    def _arrive(self, waiting: list[Text], when: float, seed: int) -> None:
        number = next(self._numbers, None)
        if number is not None:
            dice, self._next_id = random.Random(1000 * seed + number), self._next_id + 1
            alpha = min(0.985, max(0.4, dice.gauss(self.options.alpha, self.options.spread)))
            waiting.append(Text(self._next_id, dice.choice(PROMPTS), alpha, when))

    def _step(self, run: Run, waiting: list[Text], running: list[Text], is_on: bool) -> None:
        here = [text for text in waiting if text.arrives <= run.now]
        num_waiting = sum(text.prompt - text.computed for text in here)
        may_draft = is_on and may_draft_with_prompts(num_waiting, len(running))
        self.policy.expect_prompts(num_waiting)
        wanted = self._decide(running) if may_draft and running else [0] * len(running)
        is_probe = 0 < sum(map(bool, wanted)) <= min(PROBED, len(running) // 2)
        run.num_baselines += may_draft and self._is_baseline
        depths, read = self._catch_up(running, wanted, may_prefill=num_waiting < prompt_load.MANY_ROWS)
        observed, self._observed = self._observed, None
        if observed is not None:
            self.policy.observe(observed)
        deepest, slots = max(depths, default=0), padded_size(len(running)) if running else 0
        joined, prompt_rows = self._compute_prompts(here, num_waiting, len(running))
        for text in joined:
            waiting.remove(text)
        if (
            joined
            and num_waiting < prompt_load.MANY_ROWS
            and 2 * sum(map(bool, depths)) >= len(running) > 0
            and deepest
        ):
            read += sum(text.prompt for text in joined)
            for text in joined:
                text.is_current, text.cached = True, text.prompt
        context = sum(text.size for text in running)
        verify = self._pass_seconds(len(running), deepest, prompt_rows, context) * (
            1.0 + self.dice.uniform(-0.01, 0.01)
        )
        if not deepest:
            self._num_plain += 1
            if self._num_plain > MAX_FOLLOWED_ROUNDS:
                for text in running:
                    text.is_current = False
        else:
            self._num_plain = 0
        follows = not deepest and any(text.is_current for text in running)
        drafted = interpolate(DRAFTS, slots) * (deepest or follows) if running else 0.0
        prefill = DRAFT_PREFILL * self.options.prefill * read
        run.now += verify + drafted + prefill
        run.seconds["prefill"] += prefill
        run.seconds["drafts"] += drafted
        if is_probe and deepest:
            run.seconds["probes"] += verify + drafted - self._pass_seconds(len(running), 0, prompt_rows, context)
        rounds = self._commit(running, depths)
        if running:
            run.depths.append(deepest)
        for text in joined:
            text.made, text.began = 1, run.now
            running.append(text)
        if is_on:
            drafting = (DraftingObservation("draft", deepest, drafted),) if deepest else ()
            is_timed = not (read and not prompt_rows)
            self._observed = StepObservation(
                batch=len(depths),
                rows=slots * (1 + deepest),
                prefill_rows=prompt_rows,
                drafting=drafting,
                verify_seconds=verify + prefill,
                network_seconds=0.0,
                rounds=rounds,
                is_timed=is_timed,
                context=context,
                slots=slots,
            )
            if not depths:  # the engine waits for a step that only computes prompts
                self.policy.observe(self._observed)
                self._observed = None

    def _decide(self, running: list[Text]) -> list[int]:
        self._is_baseline = False
        if self.policy.skip_step(len(running)):
            return [0] * len(running)
        candidates = [DepthCandidate(t.id, TRAFFIC, t.limit, t.size, TOKENS - t.made, t.prompt) for t in running]
        depths = self.policy.decide(candidates)
        self._is_baseline = self.policy._drafts.is_drafting and not any(depths)
        return depths

    def _catch_up(self, running: list[Text], wanted: list[int], may_prefill: bool) -> tuple[list[int], int]:
        """The depths granted, and the tokens of draft prefill together with the step, as in `GraphScheduler`."""
        behind = [text for text, depth in zip(running, wanted, strict=True) if depth and not text.is_current]
        if not behind:
            return wanted, 0
        is_most, ids = 2 * len(behind) > sum(map(bool, wanted)), {text.id for text in behind}
        depths = [0 if is_most or text.id in ids else depth for text, depth in zip(running, wanted, strict=True)]
        if not may_prefill:
            return depths, 0
        read = 0
        for text in behind:
            if read >= MAX_GAP:
                break
            read += text.size - text.cached
            text.is_current, text.cached = True, text.size
        self._num_plain = -1 if not any(depths) else 0
        return depths, read

    @staticmethod
    def _compute_prompts(here: Sequence[Text], num_waiting: int, num_running: int) -> tuple[list[Text], int]:
        """Prompts that the step completes, and its prompt rows, of the `num_waiting` tokens of those that are here."""
        budget = prompt_budget(num_running, num_waiting) if here else 0
        joined, rows = list[Text](), 0
        for text in here:
            share = min(text.prompt - text.computed, budget - rows)
            text.computed, rows = text.computed + share, rows + share
            if text.computed == text.prompt:
                joined.append(text)
            if rows >= budget:
                break
        return joined, rows

    @staticmethod
    def _pass_seconds(num_decoding: int, depth: int, prompt_rows: int, context: int) -> float:
        """A graph step has rows for its slots, a step with prompts for its sequences."""
        rows = (num_decoding if prompt_rows else padded_size(num_decoding)) * (1 + depth) + prompt_rows
        return interpolate(PASSES, rows) + PER_TOKEN * context + MIXED * bool(prompt_rows)

    def _commit(self, running: list[Text], depths: list[int]) -> tuple[RoundObservation, ...]:
        rounds = []
        for text, depth in zip(running, depths, strict=True):
            alpha, count = EARLY_ALPHA if text.made < EARLY_TOKENS else text.alpha, 0
            while count < depth and self.dice.random() < alpha:
                count += 1
            text.made = min(TOKENS, text.made + count + 1)
            text.has_drafted |= depth > 0
            if text.is_current:
                text.cached = text.size
            if depth:
                rounds.append(RoundObservation(text.id, TRAFFIC, depth, count, depth))
        return tuple(rounds)


def arrival_times(path: Path, count: int, rate: float) -> list[float]:
    """The first `count` arrivals of a trace, scaled to a mean of `rate` per second."""
    seconds = [request.arrival for request in load_trace(path).requests[:count]]
    scale = (len(seconds) - 1) / rate / (seconds[-1] - seconds[0])
    return [scale * (second - seconds[0]) for second in seconds]


def open_loop(options: argparse.Namespace) -> None:
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


def closed_loop(options: argparse.Namespace) -> None:
    print("| streams | plain, tok/s | goodput / plain | lowest to highest | TPOT p50 / p99 ms plain | goodput "
          "| mean depth | sequences that draft | draft prefill | drafts | probes | baselines |")  # fmt: skip
    print("|" + "---|" * 12)
    for streams in options.streams:
        served, requests = Served(options), streams if options.whole else 3 * streams
        pairs = [
            (served.run(streams, requests, False, seed), served.run(streams, requests, True, seed))
            for seed in range(options.repeats + 1)
        ][1:]
        ratios = sorted(on.rate / off.rate for off, on in pairs)
        offs, ons = [off for off, _ in pairs], [on for _, on in pairs]
        tpots = [
            " / ".join(f"{median(run.tpot(percent) for run in runs):.2f}" for percent in (50, 99))
            for runs in (offs, ons)
        ]
        baselines = mean(on.num_baselines / len(on.depths) for on in ons)
        shares = {key: mean(on.seconds[key] / on.now for on in ons) for key in ons[0].seconds}
        cells = (
            streams, f"{median(off.rate for off in offs):.0f}", f"{median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            *tpots, f"{mean(mean(on.depths) for on in ons):.2f}",
            f"{mean(text.has_drafted for on in ons for text in on.texts):.2f}", *(f"{share:.1%}" for share in shares.values()),
            f"{baselines:.1%}",
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--alpha", type=float, default=0.82, help="mean over sequences, after the first tokens of a text"
    )
    parser.add_argument("--spread", type=float, default=0.09, help="deviation of alpha between sequences")
    parser.add_argument("--prefill", type=float, default=2.0, help="time of a draft prefill over its time alone")
    parser.add_argument("--delay", type=float, default=20.0, help="longest time until a stream sends again, ms")
    parser.add_argument("--whole", action="store_true", help="every stream has one text")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, help="pairs of runs, 5, or 12 with --arrivals")
    parser.add_argument("--arrivals", type=Path, metavar="TRACE", help="requests arrive at the times of a trace")
    parser.add_argument("--loads", default="42:336,68:540,80:640", metavar="RATE:REQUESTS,…", help="with --arrivals")
    parser.add_argument("--prompt-rows", type=int, default=prompt_load.MANY_ROWS, metavar="ROWS")
    parser.add_argument("--max-ttft", type=float, default=500.0, help="objective with --arrivals, ms")
    parser.add_argument("--max-tpot", type=float, default=25.0, help="objective with --arrivals, ms")
    options = parser.parse_args()
    prompt_load.MANY_ROWS = options.prompt_rows
    options.repeats = options.repeats or (12 if options.arrivals else 5)
    open_loop(options) if options.arrivals else closed_loop(options)


if __name__ == "__main__":
    main()
