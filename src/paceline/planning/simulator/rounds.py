"""The round of a batch: its depth, its expected tokens, and its time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.planning import ProfileCurve, WorkerProfile
from paceline.planning.simulator.settings import Speculation
from paceline.planning.simulator.texts import kinds_of_texts, pooled_alphas
from paceline.policy.cost.speculation import expected_tokens, speedup, survival
from paceline.policy.depth.prompt_load import may_draft_with_prompts
from paceline.policy.pairing.outcomes import AlternativeOdds, likely_outcomes

MARGIN = 1.03
"""Speed over plain decoding from which a batch drafts, as the policy `goodput` has it."""
CONTEXT_STEP = 256
"""Tokens of mean context within which a depth is decided once."""
AHEAD_NODES = 32
"""Tokens that a draft worker drafts ahead for a sequence while the target verifies."""
PROMPT_STEP = 128
"""Prompt rows within which a depth is decided once."""

MAX_ROWS = 9216
"""Rows up to which the time of a pass is in a table."""


@lru_cache(maxsize=16)
def _seconds_by_rows(curve: ProfileCurve) -> Sequence[float]:
    """The curve at 0 to `MAX_ROWS`."""
    return [curve.at(rows) for rows in range(MAX_ROWS + 1)]


@dataclass(frozen=True, slots=True)
class KindTokens:
    """Tokens of a sequence in one round, for one kind of texts."""

    mean: float
    variance: float
    rejection: tuple[float, ...]
    """-S_k for every position k: increasing, for a search."""

    @classmethod
    def of(cls, alphas: tuple[float, ...], depth: int) -> "KindTokens":
        chances = survival(alphas, depth)
        mean = 1.0 + sum(chances)
        # E[X^2] of X = 1 + accepted: sum over k of (2k + 1) P(accepted >= k)
        square = 1.0 + sum((2 * k + 1) * chance for k, chance in enumerate(chances, 1))
        return cls(mean, square - mean * mean, tuple(-chance for chance in chances))


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One step of a batch. Context and prompt rows are not part of `seconds`."""

    depth: int
    tokens: float
    """Expected tokens of a sequence, mean over the sequences of a batch."""
    seconds: float
    kinds: tuple[KindTokens, ...]
    """By kind of texts."""
    rows: int = 0
    """Rows of the target's pass."""
    waiting: float = 0.0
    """Part of `seconds` that the target waits for drafts."""


class Rounds:
    """Decides the depth of a batch by expected tokens per second, with the cost model of `paceline advise`.

    The time of drafting depends on the sequences that the draft device serves: those of the batch, or all sequences at a draft
    worker. A draft worker prepares the likely outcomes of a verification meanwhile (`policy/pairing/outcomes.py`), where that
    makes the target wait less.
    """

    def __init__(self, profile: WorkerProfile, speculation: Speculation | None, network_seconds: float = 0.0) -> None:
        """`network_seconds` is the round trip to a draft worker, 0 if the target's device drafts."""
        self._profile, self._speculation = profile, speculation
        self._rows = _seconds_by_rows(profile.pass_seconds)
        self._prompt_rows = None if profile.prompt_seconds is None else _seconds_by_rows(profile.prompt_seconds)
        self._usual_network = self.network_seconds = network_seconds
        self._set_alphas(1.0)
        self._known: dict[tuple[int, int, int, int], SimulatedRound] = {}
        self._kind_tokens: dict[int, tuple[KindTokens, ...]] = {}
        """By depth."""
        self._at_depth: dict[tuple[int, int, int], SimulatedRound] = {}

    @property
    def num_kinds(self) -> int:
        """Kinds of texts that differ in acceptance."""
        return len(self._kinds)

    def set_conditions(self, alpha_factor: float, network_factor: float) -> None:
        """Acceptance and network times from now on, relative to the usual ones."""
        self._set_alphas(alpha_factor)
        self.network_seconds = self._usual_network * network_factor
        self._known.clear()
        self._kind_tokens.clear()
        self._at_depth.clear()

    def _set_alphas(self, factor: float) -> None:
        speculation = self._speculation
        kinds = kinds_of_texts(speculation.alphas, speculation.spread) if speculation else ((0.0,),)
        self._kinds = tuple(tuple(min(1.0, alpha * factor) for alpha in alphas) for alphas in kinds)
        self._alphas = pooled_alphas(self._kinds, speculation.max_depth + 1 if speculation else 1)
        """Those of a batch as a whole."""

    def may_draft_with_prompts(self, prompt_rows: int, batch: int) -> bool:
        """Whether the engine may draft for a batch in a step with `prompt_rows` prompt rows."""
        is_in_slots = self._profile.is_padded and not self._usual_network
        return not is_in_slots or may_draft_with_prompts(prompt_rows, batch)

    def pass_seconds(self, rows: int, prompts: int = 0) -> float:
        """Time of a pass with rows that decode or verify, and rows of prompts; as `WorkerProfile.rows_seconds`."""
        if rows + prompts > MAX_ROWS:
            return self._profile.rows_seconds(rows, prompts)
        table, own = self._prompt_rows, self._rows
        if not prompts or table is None:
            return own[rows + prompts]
        if not rows:
            return table[prompts]
        more = table[rows + prompts] - table[rows]
        return own[rows] + more if more > 0.0 else own[rows]

    def verify_seconds(self, rows: int, context: float, prompts: int) -> float:
        """Time of a pass, with the reading of `context` tokens."""
        return self.pass_seconds(rows, prompts) + self._profile.context_seconds.value * context

    def best(self, batch: int, context: float, drafting: int, prompt_rows: int = 0) -> SimulatedRound:
        """The fastest round of `batch` sequences with `context` tokens in all, in a step that also computes `prompt_rows`.
        `drafting` is the number of sequences at the draft device, 0 if it cannot draft."""
        key = batch, int(context / (batch * CONTEXT_STEP)), drafting, (prompt_rows + PROMPT_STEP - 1) // PROMPT_STEP
        found = self._known.get(key)
        if found is None:
            context = (key[1] + 0.5) * CONTEXT_STEP * batch
            found = self._known[key] = self._best(batch, context, drafting, key[3] * PROMPT_STEP)
        return found

    def at_depth(self, batch: int, depth: int, drafting: int) -> SimulatedRound:
        """A round in which every sequence of the batch drafts `depth` tokens."""
        found = self._at_depth.get((batch, depth, drafting))
        if found is None:
            found = self._at_depth[batch, depth, drafting] = self._make(batch, depth, drafting)
        return found

    def _make(self, batch: int, depth: int, drafting: int) -> SimulatedRound:
        kinds = self._kind_tokens.get(depth)
        if kinds is None:
            kinds = self._kind_tokens[depth] = tuple(KindTokens.of(alphas, depth) for alphas in self._kinds)
        rows, waiting = batch * (depth + 1), self.waiting_seconds(batch, drafting, depth)
        mean = kinds[0].mean if len(kinds) == 1 else expected_tokens(self._alphas, depth)
        return SimulatedRound(depth, mean, self.pass_seconds(rows) + waiting, kinds, rows, waiting)

    def waiting_seconds(self, batch: int, drafting: int, depth: int) -> float:
        """Time that a batch waits for its drafts, the network included."""
        if not depth:
            return 0.0
        demand = self._profile.drafting_seconds(drafting, depth)
        if not self._usual_network:
            return demand
        branches = max(1, AHEAD_NODES // depth)
        late = max(
            0.0, self._profile.drafting_seconds(drafting * branches, depth) - self.pass_seconds(batch * (depth + 1))
        )
        ready = self.ready_share(depth) ** batch  # a step waits for the last of its drafts
        return self.network_seconds + min(demand, ready * late + (1.0 - ready) * (demand + late))

    def ready_share(self, depth: int) -> float:
        """Probability that a draft worker has prepared the outcome of a verification."""
        chances = survival(self._alphas, depth + 1)
        outcomes = likely_outcomes(self._alphas, AlternativeOdds.PRIOR, depth, depth, AHEAD_NODES)
        return min(1.0, chances[-1] + sum(outcome.probability for outcome in outcomes))

    def _best(self, batch: int, context: float, drafting: int, prompt_rows: int) -> SimulatedRound:
        speculation = self._speculation
        if (
            speculation is None
            or not drafting
            or expected_tokens(self._alphas, 1) == 1.0
            or not self.may_draft_with_prompts(prompt_rows, batch)
        ):
            return self.at_depth(batch, 0, 0)
        if speculation.rule == "fixed":
            return self.at_depth(batch, speculation.max_depth, drafting)
        costs = _RoundCosts(self, drafting, prompt_rows)
        depths = range(1, speculation.max_depth + 1)  # ties go to the smaller depth
        speedups = [speedup(costs, self._alphas, batch, depth, context) for depth in depths]
        fastest = max(speedups)
        return self.at_depth(batch, speedups.index(fastest) + 1 if fastest >= MARGIN else 0, drafting)


@dataclass(frozen=True, slots=True)
class _RoundCosts:
    """The costs of rounds with prompts in the same pass. The draft device serves `drafting` sequences."""

    rounds: Rounds
    drafting: int
    prompt_rows: int

    def verify(self, rows: int, context: float) -> float:
        return self.rounds.verify_seconds(rows, context, self.prompt_rows)

    def draft(self, batch: int, depth: int) -> float:
        return self.rounds.waiting_seconds(batch, self.drafting, depth)
