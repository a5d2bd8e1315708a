"""The round of a batch: its depth, its expected tokens, and its time."""

from dataclasses import dataclass
from functools import cached_property

from paceline.cluster.cost.cost import Method, Target, best_depth, expected_tokens, survival
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import SimulationConfig, Speculation

MARGIN = 1.03
"""Speed over plain decoding from which a batch drafts, as the policy `goodput` has it."""
CONTEXT_STEP = 256
"""Tokens of mean context within which a depth is decided once."""


@dataclass(frozen=True, slots=True)
class Round:
    """One step of a batch. Context is not part of `seconds`."""

    depth: int
    tokens: float
    """Expected tokens of a sequence."""
    variance: float
    """Variance of the tokens of a sequence."""
    seconds: float
    rejection: tuple[float, ...] = ()
    """-S_k for every position k: increasing, for a search."""


class Rounds:
    """Decides the depth of a batch by expected tokens per second, with the cost model of `paceline advise`."""

    def __init__(self, config: SimulationConfig) -> None:
        self._profile: WorkerProfile = config.profile
        self._speculation: Speculation | None = config.speculation
        self._targets_per_draft = config.workers / config.draft_workers if config.draft_workers else 1.0
        self._network = config.profile.round_trip_seconds.value if config.draft_workers else 0.0
        self._known: dict[tuple[int, int], Round] = {}

    @cached_property
    def rows(self) -> list[float]:
        """Seconds of a pass by its rows."""
        return [self._profile.pass_seconds.at(rows) for rows in range(4097)]

    def pass_seconds(self, rows: int) -> float:
        return self.rows[rows] if rows < len(self.rows) else self._profile.pass_seconds.at(rows)

    def best(self, batch: int, context: float) -> Round:
        """The fastest round of `batch` sequences with `context` tokens in all."""
        key = batch, int(context / (batch * CONTEXT_STEP))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._best(batch, (key[1] + 0.5) * CONTEXT_STEP * batch)
        return found

    def at_depth(self, batch: int, depth: int) -> Round:
        """A round in which every sequence of the batch drafts `depth` tokens."""
        alphas = self._speculation.alphas if self._speculation else (0.0,)
        chances = survival(alphas, depth)
        mean = 1.0 + sum(chances)
        # E[X^2] of X = 1 + accepted: sum over k of (2k + 1) P(accepted >= k)
        square = 1.0 + sum((2 * k + 1) * chance for k, chance in enumerate(chances, 1))
        seconds = self.pass_seconds(batch * (depth + 1)) + self._drafting(batch, depth)
        return Round(depth, mean, square - mean * mean, seconds, tuple(-chance for chance in chances))

    def drafting_seconds(self, batch: int, depth: int) -> float:
        """Time that a batch waits for drafts: the steps of the draft model, which other targets share."""
        return self._profile.drafting_seconds(batch * self._targets_per_draft, depth) if depth else 0.0

    @property
    def network_seconds(self) -> float:
        return self._network

    def _drafting(self, batch: int, depth: int) -> float:
        return self.drafting_seconds(batch, depth) + self._network if depth else 0.0

    def _best(self, batch: int, context: float) -> Round:
        if self._speculation is None or expected_tokens(self._speculation.alphas, 1) == 1.0:
            return self.at_depth(batch, 0)
        depths = range(self._speculation.max_depth + 1)
        passes = {batch * (depth + 1): self._profile.verify_seconds(batch, depth, context) for depth in depths}
        drafts = {depth: self.drafting_seconds(batch, depth) for depth in depths[1:]}
        method = Method("draft_model", self._speculation.alphas, drafts, self._network)
        found = best_depth(Target(passes, batch), method, self._speculation.max_depth)
        return self.at_depth(batch, found.depth if found.speedup >= MARGIN else 0)
