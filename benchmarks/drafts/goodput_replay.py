"""The sweep of benchmarks/gpu/gpu.py in a simulation, without a GPU: `goodput` decides with step costs measured on an H200.

    python benchmarks/drafts/goodput_replay.py
    python benchmarks/drafts/goodput_replay.py --shape 70b --batches 1 --fixed 7 --alpha 0.8 --early 0.8

Sequences are admitted as prompts fit into passes, have different alphas, and end one after another. It prints the
lines of `gpu.py sweep`. `--fixed` adds the speed of `goodput` over that of a fixed depth.
"""

import argparse
import random
from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import mean, median

from paceline.core.traffic import TrafficClass
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.drift import DriftTest
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.step import padded_size

MS = 1e-3
PASSES = {
    "8b": {
        1: 3.92, 2: 3.97, 4: 4.0, 8: 4.05, 16: 4.4, 32: 4.5, 64: 4.9, 128: 5.6, 192: 6.4, 256: 7.2, 512: 10.9, 640: 14.0,
        768: 15.9, 1024: 19.8, 1280: 26.2, 2048: 40.0,
    },
    "70b": {1: 18.8, 8: 19.6, 9: 28.5, 16: 29.4, 32: 41.1, 128: 80.5, 2048: 1288.0},
}  # fmt: skip
"""Milliseconds of a pass by rows, without attention to contexts: the 8B shape, and the 70B shape in FP8."""
PER_TOKEN = 28e-9
"""Seconds per token of context in a pass."""
DRAFTS = (0.55, 0.62, 0.62, 0.64, 0.75, 1.0, 1.6, 1.8, 1.85)
"""Milliseconds of a draft step for 1, 2, 4, … 256 sequences."""
DRAFT_PREFILL = 1.3e-6
HOST = 5 * MS
"""Host time of a step with prompts."""
LAUNCH = 1 * MS
"""Delay of the first graph step after a host step."""
LOAD_BATCH = 0.1 * MS
"""Time per sequence to load a batch into slots again."""
PROMPTS = (40, 60, 80, 100, 200, 300, 600, 900)
MAX_DEPTH = 8
PASS_ROWS, STEPS_BETWEEN_ADMISSIONS, TRAFFIC = 2048, 2, TrafficClass("draft", "chat")


def pass_seconds(shape: str, rows: int) -> float:
    sizes, times = [*PASSES[shape]], [*PASSES[shape].values()]
    i = bisect_left(sizes, rows)
    if i == len(sizes):
        return times[-1] * MS * rows / sizes[-1]
    left, right = max(0, i - 1), i
    share = (rows - sizes[left]) / (sizes[right] - sizes[left]) if right > left else 0.0
    return (times[left] + (times[right] - times[left]) * share) * MS


@dataclass
class Text:
    """A sequence; `alpha` is its acceptance after the first tokens."""

    id: int
    prompt: int
    alpha: float
    made: int = 1
    is_read: bool = False

    @property
    def size(self) -> int:
        return self.prompt + self.made

    def accepted(self, depth: int, early: float, dice: random.Random) -> int:
        chance, count = early if self.made < 12 else self.alpha, 0
        while count < depth and dice.random() < chance:
            count += 1
        return count


@dataclass
class Run:
    seconds: float = 0.0
    began: float = 0.0
    tokens: int = 0
    depths: list[int] = field(default_factory=list)
    rate: float = 0.0
    """Tokens per second from when all decode until the first ends."""


class Replay:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dice = options, random.Random(options.seed)
        padded = PaddedBatch(frozenset({"draft"}), padded_size, lambda depth: depth)
        self.policy, self.drift = GoodputDepth(MAX_DEPTH, padded=[padded]), DriftTest()
        warm_up = {1 << n: self._pass_seconds(1 << n) * (options.warm_up if n in (7, 8) else 1.0) for n in range(11)}
        self.policy.calibrate(warm_up, PER_TOKEN * options.per_token)
        self._next = 0

    def _pass_seconds(self, rows: int) -> float:
        return pass_seconds(self.options.shape, rows)

    def decode(self, batch: int, fixed: int | None) -> Run:
        """`fixed`: the depth of all rounds, 0 for plain decoding. None if `goodput` decides."""
        is_on = fixed is None
        waiting, running = [self._text(i) for i in range(batch)], []
        run, since_host, since_drafts, slots = Run(), STEPS_BETWEEN_ADMISSIONS, 0, 0
        while waiting or running:
            if waiting and (
                since_host >= STEPS_BETWEEN_ADMISSIONS or 2 * sum(text.prompt for text in waiting) >= PASS_ROWS
            ):
                since_host = slots = 0
                self._admit(waiting, running, run)
                continue
            if 2 * len(running) <= slots:
                run.seconds += LOAD_BATCH * len(running)
                slots = 0
            slots = slots or padded_size(len(running))
            since_host += 1
            depths = [min(fixed, self._limit(text)) for text in running] if fixed is not None else self._decide(running)
            since_drafts = 0 if any(depths) else since_drafts + 1
            self._round(running, depths, slots, run, is_on, is_first=since_host == 1, follows=since_drafts <= 2)
            ended = [text for text in running if text.made >= self.options.tokens]
            if ended and not run.rate and not waiting:
                run.rate = run.tokens / (run.seconds - run.began)
            for change in self.drift.close([text.id for text in ended]) if is_on else ():
                self.policy.restart(change.traffic, change.after)
            running = [text for text in running if text.made < self.options.tokens]
        return run

    def _text(self, which: int) -> Text:
        """Sequence `which`, always the same."""
        dice, self._next = random.Random(which), self._next + 1
        alpha = min(0.985, max(0.5, dice.gauss(self.options.alpha, 0.09)))
        return Text(self._next, dice.choice(PROMPTS), alpha)

    def _admit(self, waiting: list[Text], running: list[Text], run: Run) -> None:
        rows = len(running)
        for text in running:
            text.made += 1
        context = sum(text.size for text in running)
        while waiting and rows + waiting[0].prompt <= PASS_ROWS:
            rows += waiting[0].prompt
            running.append(waiting.pop(0))
        run.seconds += self._pass_seconds(rows) + PER_TOKEN * context + HOST
        if not waiting:
            run.began, run.tokens, run.depths = run.seconds, 0, []

    def _limit(self, text: Text) -> int:
        return min(MAX_DEPTH, self.options.tokens - text.made - 1)

    def _decide(self, running: list[Text]) -> list[int]:
        if self.policy.skip_step(len(running)):
            return [0] * len(running)
        tokens = self.options.tokens
        return self.policy.decide(
            [DepthCandidate(t.id, TRAFFIC, self._limit(t), t.size, tokens - t.made) for t in running]
        )

    def _round(
        self, running: list[Text], depths: list[int], slots: int, run: Run, is_on: bool, is_first: bool, follows: bool
    ) -> None:
        deepest, context = max(depths), sum(text.size for text in running)
        late = [text for text, depth in zip(running, depths, strict=True) if depth and not text.is_read]
        read = sum(text.size for text in late)
        for text in late:
            text.is_read = True
        run.seconds += LOAD_BATCH * len(running) * bool(late)
        each = DRAFTS[(slots - 1).bit_length()] * MS
        verify = self._pass_seconds(slots * (1 + deepest)) + PER_TOKEN * context + LAUNCH * is_first
        verify *= 1.0 + self.dice.uniform(-0.01, 0.01)
        is_followed = deepest == 0 and follows and any(text.is_read for text in running)
        run.seconds += verify + each * (deepest or is_followed) + DRAFT_PREFILL * read
        rounds = []
        for text, depth in zip(running, depths, strict=True):
            count = text.accepted(depth, self.options.early, self.dice)
            run.tokens += min(count + 1, self.options.tokens - text.made)
            text.made += min(count + 1, self.options.tokens - text.made)
            text.is_read = text.is_read and follows
            if depth:
                rounds.append(RoundObservation(text.id, TRAFFIC, depth, count, depth))
                self.drift.observe(TRAFFIC, text.id, count > 0)
        run.depths.append(deepest)
        if is_on:
            drafting = (
                (DraftingObservation("draft", deepest, each * deepest, read, DRAFT_PREFILL * read),) if deepest else ()
            )
            rows = slots * (1 + deepest)
            observed = len(running), rows, 0, drafting, verify, 0.0, tuple(rounds)
            load_seconds = LOAD_BATCH * len(running) * bool(late)
            self.policy.observe(
                StepObservation(*observed, context=context, slots=slots, switch_on_seconds=load_seconds)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=0.88, help="mean over sequences")
    parser.add_argument("--early", type=float, default=0.96, help="alpha of the first tokens of a text")
    parser.add_argument("--warm-up", type=float, default=1.0, help="factor on the warm-up's times of 128 and 256 rows")
    parser.add_argument(
        "--per-token", type=float, default=1.0, help="factor on the warm-up's time per token of context"
    )
    parser.add_argument("--shape", choices=[*PASSES], default="8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1 << n for n in range(9)])
    parser.add_argument("--tokens", type=int, default=128, help="length of all outputs")
    parser.add_argument("--fixed", type=int, default=0, help="a depth to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    replay = Replay(options)
    for batch in options.batches:
        pairs = [(replay.decode(batch, 0), replay.decode(batch, None)) for _ in range(options.repeats + 1)][1:]
        ratios = sorted(on.rate / off.rate for off, on in pairs)
        whole = median(off.seconds / on.seconds for off, on in pairs)
        depth = sum(pairs[-1][1].depths) / len(pairs[-1][1].depths)
        line = (
            f"batch {batch:3}: ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"with prefill {whole:.2f}, depth {depth:.2f}"
        )
        if options.fixed:
            fixed = [replay.decode(batch, options.fixed).rate for _ in pairs]
            line += f", of depth {options.fixed} {mean(on.rate for _, on in pairs) / mean(fixed):.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
