"""A simulated server with known alphas and costs and a depth policy in the loop. Run it for the figures of docs/depth.md.

Speed is compared in expectation: a step that drafts depth K for a sequence earns 1 + sum_k prod alpha, while the policy
itself observes sampled acceptances and noisy times. A ratio then depends on the decisions and not on sampling noise.
"""

import heapq
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from paceline.core.traffic import TrafficClass
from paceline.policy.cost.speculation import expected_tokens
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import (
    DepthCandidate,
    DepthPolicy,
    DraftingObservation,
    RoundObservation,
    StepObservation,
)
from paceline.policy.depth.rules import AdditiveDepth, ThresholdDepth
from tests.traffic import CHAT, traffic_class

MS = 1e-3
LIMIT = 63


@dataclass(frozen=True)
class World:
    """`rows_seconds`: the target's pass. Drafting costs `draft` per token and `network` per round."""

    rows_seconds: Callable[[float], float] = lambda rows: 15 * MS
    draft: float = 2 * MS
    network: float = 0.5 * MS
    delivery: float = 1.0
    overhead: float = 0.0
    """Cost of drafting at any depth."""
    per_token: float = 0.0
    """Cost of a token of context, in any pass."""

    def drafting(self, deepest: int) -> float:
        return self.overhead + self.draft * deepest if deepest else 0.0

    def seconds(self, rows: float, deepest: int) -> float:
        return self.rows_seconds(rows) + self.drafting(deepest) + (self.network if deepest else 0.0)

    def rate(self, alpha: float, batch: int, depth: int) -> float:
        """Tokens per second at a fixed depth for all."""
        return batch * expected_tokens([alpha] * depth, depth) / self.seconds(batch * (depth + 1), depth)

    def best_rate(self, alpha: float, batch: int, deepest: int = 8) -> float:
        return max(self.rate(alpha, batch, depth) for depth in range(deepest + 1))


def roofline(rows: float) -> float:
    """Bound by memory up to about 100 rows, then by arithmetic."""
    return 1 * MS + max(10 * MS, 0.1 * MS * rows)


def gpu(rows: float) -> float:
    """An 8B model: 32 rows take 15% longer than one."""
    return (4.1 + 0.02 * (rows - 1)) * MS


def linear(rows: float) -> float:
    return 0.5 * MS * rows


class Tree:
    """A tree drafted best first. The target picks one of a node's children with the probabilities `children`, or none."""

    def __init__(self, children: tuple[float, ...], num_nodes: int) -> None:
        self.parents: list[int] = []
        self.levels: list[int] = []
        self.probabilities: list[float] = []
        """Acceptance probability of node r; never increasing."""
        self._children: dict[int, list[tuple[float, int]]] = {}  # node -> (probability, child)
        queue = [(-p, -1, i) for i, p in enumerate(children)]
        heapq.heapify(queue)
        while len(self.parents) < num_nodes:
            p, parent, place = heapq.heappop(queue)
            node = len(self.parents)
            self.parents.append(parent)
            self.levels.append(1 if parent < 0 else self.levels[parent] + 1)
            self.probabilities.append(-p)
            self._children.setdefault(parent, []).append((children[place], node))
            for i, own in enumerate(children):
                heapq.heappush(queue, (p * own, node, i))

    def expected(self, num_nodes: int) -> float:
        return 1.0 + sum(self.probabilities[:num_nodes])

    def walk(self, num_nodes: int, dice: random.Random) -> tuple[int, ...]:
        """The accepted nodes of its first `num_nodes`."""
        path: list[int] = []
        while True:
            children = self._children.get(path[-1] if path else -1, ())
            ends = accumulate(p for p, _ in children)
            at = dice.random()
            node = next((node for end, (_, node) in zip(ends, children, strict=True) if at < end), num_nodes)
            if node >= num_nodes:
                return tuple(path)
            path.append(node)


@dataclass
class Totals:
    tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Time of plain decoding for as many tokens."""
    steps: int = 0
    drafting_steps: int = 0

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def decided(policy: DepthPolicy, batch: list[DepthCandidate]) -> list[int]:
    """The depths, as the engine requests them."""
    return [0] * len(batch) if policy.skip_step(len(batch)) else policy.decide(batch)


class Simulation:
    """Runs a policy in a world. `alpha`, `batch` and `context`, the tokens of every sequence, may change between steps.

    With a `tree`, drafts are its first nodes and `alpha` is unused. With `slots`, the slots of a batch of that size, passes
    are padded."""

    context = 0
    slots: Callable[[int], int] | None = None
    reports_slots = True

    def __init__(
        self,
        policy: DepthPolicy,
        world: World,
        alpha: float = 0.7,
        batch: int = 1,
        noise: float = 0.05,
        seed: int = 0,
        tree: Tree | None = None,
        traffic: TrafficClass = CHAT,
    ):
        self.policy, self.world, self.alpha, self.batch = policy, world, alpha, batch
        self.tree, self.traffic = tree, traffic
        self._noise, self._random = noise, random.Random(seed)
        self.depths: list[int] = []

    def run(self, steps: int) -> Totals:
        totals = Totals()
        for _ in range(steps):
            self.step(totals)
        return totals

    def step(self, totals: Totals) -> None:
        self.depths = self.decide()
        self.take(self.depths, totals, self.world)

    def decide(self) -> list[int]:
        return decided(self.policy, [DepthCandidate(i, self.traffic, LIMIT, self.context) for i in range(self.batch)])

    def take(
        self,
        requested: list[int],
        totals: Totals,
        world: World,
        is_timed: bool = True,
        ids: list[int] | None = None,
        prefill: tuple[int, float] = (0, 0.0),
    ) -> None:
        drafted = [depth if self._random.random() < world.delivery else 0 for depth in requested]
        method, deepest = self.traffic.method, max(requested)
        slots = self.slots(len(requested)) if self.slots else len(requested)
        rows = slots * (1 + max(drafted)) if self.slots else slots + sum(drafted)
        tokens = sum(self.expected(depth) for depth in drafted)
        context = len(requested) * self.context
        context_seconds = world.per_token * context
        totals.tokens += tokens
        totals.seconds += world.seconds(rows, deepest) + context_seconds
        totals.plain_seconds += tokens / len(requested) * (self.world.seconds(slots, 0) + context_seconds)
        totals.steps += 1
        totals.drafting_steps += deepest > 0
        numbers = ids or range(len(requested))
        rounds = tuple(self._round(*one) for one in zip(numbers, drafted, requested, strict=True))
        drafting: tuple[DraftingObservation, ...] = ()
        if deepest:
            drafting = (DraftingObservation(method, deepest, self._noisy(world.drafting(deepest)), *prefill),)
        is_padded = self.slots is not None and self.reports_slots
        self.policy.observe(
            StepObservation(
                batch=len(requested),
                rows=rows if is_padded else len(requested) + sum(drafted),
                prefill_rows=0,
                drafting=drafting,
                verify_seconds=self._noisy(world.rows_seconds(rows) + context_seconds),
                network_seconds=self._noisy(world.network) if deepest else 0.0,
                rounds=rounds,
                is_timed=is_timed,
                context=context,
                slots=slots if is_padded else None,
            )
        )

    def expected(self, depth: int) -> float:
        return self.tree.expected(depth) if self.tree else expected_tokens([self.alpha] * depth, depth)

    def _round(self, sequence_id: int, drafted: int, requested: int) -> RoundObservation:
        if self.tree is None or drafted == 0:
            return RoundObservation(sequence_id, self.traffic, drafted, self._accepted(drafted), requested)
        path = self.tree.walk(drafted, self._random)
        levels = max(self.tree.levels[:drafted])
        return RoundObservation(sequence_id, self.traffic, levels, len(path), requested, drafted, path)

    def _accepted(self, drafted: int) -> int:
        for i in range(drafted):
            if self._random.random() >= self.alpha:
                return i
        return drafted

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self._noise))


class GraphSimulation(Simulation):
    """Graph steps, submitted one ahead. A draft follows two plain steps. After more, or if few of the batch draft, a step of
    the slow world `host` replaces the graph step, after a second decision."""

    def __init__(
        self, policy: DepthPolicy, world: World, host: World, *, is_host_timed: bool = False, **rest: Any
    ) -> None:
        super().__init__(policy, world, **rest)
        self.host, self._is_host_timed = host, is_host_timed
        self._in_flight: deque[list[int]] = deque()
        self._is_current, self._num_plain = False, 0

    def step(self, totals: Totals) -> None:
        requested = self.depths = self.decide()
        is_for_few = 2 * sum(requested) < max(requested) * len(requested) and max(requested) > 1
        if any(requested) and (not self._is_current or is_for_few):
            while self._in_flight:
                self.take(self._in_flight.popleft(), totals, self.world)
            requested = self.depths = self.decide()
            self.take(requested, totals, self.host, is_timed=self._is_host_timed)
            self._is_current, self._num_plain = any(requested), 0
            return
        self._num_plain = 0 if any(requested) else self._num_plain + 1
        self._is_current = self._is_current and self._num_plain <= 2
        if self._is_current and not any(requested):
            totals.seconds += self.world.drafting(1)
        self._in_flight.append(requested)
        if len(self._in_flight) > 1:
            self.take(self._in_flight.popleft(), totals, self.world)


class PrefillSimulation(Simulation):
    """Sequences with a prompt that end after `tokens` tokens, each followed by a new one. The first draft of a sequence needs a
    draft prefill, `per_token` seconds a token, in an untimed step."""

    def __init__(
        self, policy: DepthPolicy, world: World, *, tokens: int, per_token: float, prompt: int = 350, **rest: Any
    ) -> None:
        super().__init__(policy, world, **rest)
        self._tokens, self._prompt, self._per_token = tokens, prompt, per_token
        self._next = self.batch
        self._ids = list(range(self.batch))
        self._num_output = [float(tokens * i // self.batch) for i in range(self.batch)]  # they end at different times
        self._prefilled: set[int] = set()

    def step(self, totals: Totals) -> None:
        sizes = [self._prompt + int(count) for count in self._num_output]
        left = [max(1, self._tokens - int(count)) for count in self._num_output]
        facts = zip(self._ids, sizes, left, strict=True)
        requested = self.depths = decided(
            self.policy, [DepthCandidate(i, self.traffic, LIMIT, *rest) for i, *rest in facts]
        )
        new = [i for i, depth in enumerate(requested) if depth and self._ids[i] not in self._prefilled]
        self._prefilled.update(self._ids[i] for i in new)
        num_tokens = sum(sizes[i] for i in new)
        prefill = num_tokens, num_tokens * self._per_token
        totals.seconds += prefill[1]
        self.take(requested, totals, self.world, is_timed=not new, ids=self._ids, prefill=prefill)
        self._num_output = [
            count + self.expected(depth) for count, depth in zip(self._num_output, requested, strict=True)
        ]
        for i, count in enumerate(self._num_output):
            if count >= self._tokens:
                self._ids[i], self._num_output[i], self._next = self._next, 0.0, self._next + 1

    def ideal(self) -> float:
        """Speed of the best fixed depth with a prefill of every prompt, or of plain decoding."""
        plain = self._tokens * self.world.seconds(self.batch, 0)
        faster = self.world.best_rate(self.alpha, self.batch) / self.world.rate(self.alpha, self.batch, 0)
        return max(1.0, plain / (plain / faster + self.batch * self._prompt * self._per_token))


def steps_until(simulation: Simulation, speedup: float, limit: int) -> int:
    """Steps until the end of the first block of 50 that reaches `speedup`."""
    for block in range(limit // 50):
        if simulation.run(50).speedup >= speedup:
            return 50 * (block + 1)
    raise AssertionError(f"not at {speedup:.2f}x within {limit} steps")


def calibrated(world: World, max_depth: int = 8, padded: PaddedBatch | None = None) -> GoodputDepth:
    """A policy calibrated as by the warm-up of a server."""
    policy = GoodputDepth(max_depth, padded=(padded,) if padded else ())
    sizes = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
    policy.calibrate({rows: world.rows_seconds(rows) for rows in sizes}, world.per_token)
    return policy


POLICIES: dict[str, Callable[[World], DepthPolicy]] = {
    "goodput": calibrated,
    "goodput, no warm-up": lambda world: GoodputDepth(),
    "threshold": lambda world: ThresholdDepth(),
    "additive": lambda world: AdditiveDepth(),
}


def table() -> None:
    print("| costs | alpha | batch | best fixed depth | " + " | ".join(POLICIES) + " |")
    print("|---|---|---|---|" + "---|" * len(POLICIES))
    cases = [("flat", World(), alpha, 1) for alpha in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)]
    cases += [("roofline", World(roofline), 0.7, batch) for batch in (1, 8, 32, 64, 128)]
    cases += [("linear", World(linear), 0.9, batch) for batch in (8, 64)]
    cases += [("draft 40 ms", World(draft=40 * MS), 0.9, 1)]
    for name, world, alpha, batch in cases:
        plain = world.rate(alpha, batch, 0)
        best = max(range(9), key=lambda depth: world.rate(alpha, batch, depth))
        cells = [f"{best}: {world.rate(alpha, batch, best) / plain:.3f}x"]
        for make in POLICIES.values():
            seeds, steps = (5, 3000) if batch == 1 else (2, 1000)
            runs = [Simulation(make(world), world, alpha, batch, seed=seed).run(steps) for seed in range(seeds)]
            speedups = [run.speedup for run in runs]
            cells.append(f"{sum(speedups) / seeds:.3f}x ({min(speedups):.3f})")
        print(f"| {name} | {alpha} | {batch} | " + " | ".join(cells) + " |")


def best_tree(tree: Tree, world: World, batch: int, most: int = 31) -> tuple[int, float]:
    """The best number of nodes, equal for all, and its speed over plain decoding."""
    rates = [batch * tree.expected(n) / world.seconds(batch * (n + 1), n) for n in range(most + 1)]
    best = max(range(most + 1), key=rates.__getitem__)
    return best, rates[best] / rates[0]


def trees() -> None:
    """Speed over 600 steps after 300, three seeds."""
    print("| children | batch | best fixed nodes | goodput |\n|---|---|---|---|")
    world = World(gpu, draft=0.0, network=0.0, overhead=0.6 * MS)
    for children in ((0.4, 0.2, 0.1, 0.05), (0.55, 0.15, 0.07, 0.03), (0.75, 0.1, 0.04, 0.02)):
        tree = Tree(children, LIMIT)
        for batch in (1, 8):
            best, speedup = best_tree(tree, world, batch)
            speedups = []
            for seed in range(3):
                simulation = Simulation(calibrated(world, 31), world, batch=batch, tree=tree, seed=seed)
                simulation.run(300)
                speedups.append(simulation.run(600).speedup)
            cells = f"{best}: {speedup:.3f}x | {sum(speedups) / 3:.3f}x ({min(speedups):.3f})"
            print(f"| {', '.join(map(str, children))} | {batch} | {cells} |")


def prefills() -> None:
    """Speed over 2,000 steps after 1,000, with draft prefills of prompts of 350 tokens."""
    print("| batch | tokens each | draft prefill, ms a prompt | best | goodput |\n|---|---|---|---|---|")
    world = World(gpu, draft=0.8 * MS, network=0.0)
    for batch in (1, 16, 64):
        for tokens in (32, 128, 512):
            for prefill in (0.5, 3.0):
                simulation = PrefillSimulation(
                    calibrated(world), world, alpha=0.8, batch=batch, tokens=tokens, per_token=prefill * MS / 350
                )
                simulation.run(1000)
                speedup = simulation.run(2000).speedup
                print(f"| {batch} | {tokens} | {prefill} | {simulation.ideal():.2f}x | {speedup:.2f}x |")


def jumps() -> None:
    world = World(draft=5 * MS)
    for before, after in ((0.2, 0.9), (0.9, 0.2)):
        took = []
        for seed in range(5):
            simulation = Simulation(calibrated(world), world, before, seed=seed)
            simulation.run(3000)
            simulation.alpha = after
            took.append(steps_until(simulation, 0.95 * world.best_rate(after, 1) / world.rate(after, 1, 0), 20_000))
        print(
            f"alpha {before} -> {after}, draft 5 ms, batch 1: at 95% of the best after {sorted(took)} steps (5 seeds)"
        )


def ramp(policy: DepthPolicy, world: World, alpha: float) -> list[float]:
    """Speed over plain decoding for batches from 1 to 128, 100 steps each."""
    simulation, speedups = Simulation(policy, world, alpha), []
    for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
        simulation.batch = batch
        speedups.append(simulation.run(100).speedup)
    return speedups


def microseconds(categories: int) -> float:
    """CPU time of one `decide` for 64 sequences, up to 8 drafts each, after new measurements; the fastest of 300."""
    policy = calibrated(World(roofline))
    simulation = Simulation(policy, World(roofline), 0.7, 64)
    batch = [DepthCandidate(i, traffic_class(f"chat/{i % categories}"), 8) for i in range(64)]
    fastest = float("inf")
    for _ in range(300):
        simulation.step(Totals())
        start = time.thread_time()
        policy.decide(batch)
        fastest = min(fastest, time.thread_time() - start)
    return fastest * 1e6


if __name__ == "__main__":
    table()
    print()
    trees()
    print()
    prefills()
    print()
    jumps()
    for name, make in POLICIES.items():
        speedups = ramp(make(World(roofline)), World(roofline), 0.7)
        print(f"batch 1 -> 128, roofline, alpha 0.7, {name}: " + " ".join(f"{speedup:.2f}" for speedup in speedups))
    for categories in (1, 2, 4):
        print(f"decide, 64 sequences x 8 drafts, {categories} categories: {microseconds(categories):.0f} µs")
