"""What the depth policy observes of a committed step: the outcome of its drafts, and the cost of drafting.

`DraftCostMeter` collects the cost between two observed steps: drafting by method, draft prefill, the network, and an idle
device. `observe_rounds` and `observe_step` make the policy's observations from the verified rounds and from these costs.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.core.traffic import TrafficClass
from paceline.engine.step.step import SequenceResult, StepResult
from paceline.policy.depth.observation import DraftingObservation, RoundObservation, StepObservation
from paceline.speculation.drafts import DraftCost, DraftPrefill

NO_PREFILL = DraftPrefill()


@dataclass(frozen=True, slots=True)
class StepCost:
    """What the drafts of one step cost, without the target's pass."""

    draft_seconds: Mapping[str, float]
    """Time of drafting by method, without draft prefill and network."""
    prefills: Mapping[str, DraftPrefill]
    """Draft prefills by method, since the last step of the method."""
    network_seconds: float
    idle_seconds: float
    """Time in which the device waited for a change of executors, without draft prefill."""
    is_timed: bool
    """Whether these times are typical of later steps."""
    host_seconds: float | None = None
    """Time of the host between the step before and this one, without drafting. None if it is not known."""

    @property
    def total_draft_seconds(self) -> float:
        """Time of drafting and of draft prefill, of all methods."""
        return sum(self.draft_seconds.values()) + _seconds(self.prefills)


class DraftCostMeter:
    """Adds up costs while a step is prepared; `take` returns those of the step that was observed."""

    def __init__(self, clock: Clock, graph_methods: frozenset[str]) -> None:
        """`graph_methods` are the methods that draft inside graph steps."""
        self._clock, self._graph_methods = clock, graph_methods
        self._draft_seconds: defaultdict[str, float] = defaultdict(float)
        self._prefills: defaultdict[str, DraftPrefill] = defaultdict(DraftPrefill)
        """Draft prefills by method since the last observed step of the method."""
        self._network_seconds = 0.0
        self._verify_seconds = 0.0
        """Time of the target's pass in the last host step."""
        self._observe_seconds = 0.0
        """Time of `observe` calls since the last step."""
        self._last_verified: float | None = None
        """When the previous host step was verified. None if the engine was idle since then."""
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def deadline(self) -> float:
        """The time until which a step may wait for drafts. A wait longer than a pass of the target cannot pay."""
        return self._clock.now() + self._verify_seconds

    def add_collect(self, method: str, seconds: float, cost: DraftCost) -> None:
        """Add the time of a `collect` call. `cost` has the parts of it that are not drafting."""
        network = min(seconds, cost.network_seconds)
        self._network_seconds += network
        self.add_prefill(method, cost.prefill)
        self._draft_seconds[method] += max(0.0, seconds - network - cost.prefill.seconds)

    def add_observe(self, method: str, seconds: float) -> None:
        """Add the time of an `observe` call."""
        self._draft_seconds[method] += seconds
        self._observe_seconds += seconds

    def has_ended(self) -> None:
        """No sequence runs: the next step may begin much later."""
        self._last_verified = None

    def add_prefill(self, method: str, prefill: DraftPrefill) -> None:
        """Add a draft prefill; the next step that drafts by `method` carries its cost."""
        self._prefills[method] += prefill

    def graph_paused(self) -> None:
        """The graph executor handed its sequences to the host: the device waits until the next graph step."""
        self._idle_since = self._clock.now()

    def graph_resumed(self) -> None:
        """The graph executor submitted a step."""
        if self._idle_since is not None:
            self._idle_seconds, self._idle_since = self._clock.now() - self._idle_since, None

    def take(self, result: StepResult, rounds: Iterable[SequenceResult]) -> StepCost:
        """The cost of this step, whose drafts were requested for `rounds`. The sums restart."""
        if result.draft_seconds is not None:  # a graph step, with drafts of one method
            draft_seconds: Mapping[str, float] = {
                sequence_result.sequence.method: result.draft_seconds for sequence_result in rounds
            }
            network, is_timed, host = 0.0, result.is_timed, None
            self._last_verified = None
        else:
            self._idle_since = None  # the host had work to do: the device did not wait for a change of executors
            self._verify_seconds = result.verify_seconds
            draft_seconds, self._draft_seconds = self._draft_seconds, defaultdict(float)
            network, self._network_seconds = self._network_seconds, 0.0
            host = self._host_seconds(result)
            # A host step of a graph method only starts it or computes its draft prefill
            is_timed = not any(
                sequence_result.sequence.method in self._graph_methods for sequence_result in result.sequences
            )
        prefills = {method: self._prefills.pop(method, NO_PREFILL) for method in draft_seconds}
        idle, self._idle_seconds = max(0.0, self._idle_seconds - _seconds(prefills)), 0.0
        return StepCost(draft_seconds, prefills, network, idle, is_timed, host)

    def _host_seconds(self, result: StepResult) -> float | None:
        """Time of the host before this step."""
        verified, self._last_verified = self._last_verified, result.times.verified
        observed, self._observe_seconds = self._observe_seconds, 0.0
        return None if verified is None else max(0.0, result.times.began - verified - observed)


def _seconds(prefills: Mapping[str, DraftPrefill]) -> float:
    return sum(prefill.seconds for prefill in prefills.values())


@dataclass(frozen=True, slots=True)
class StepContents:
    """The sequences of a step by what they did."""

    rounds: list[SequenceResult]
    """Results of the sequences that requested drafts."""
    plain: list[Sequence]
    """Sequences that decoded and requested no draft."""
    prefill_rows: int
    """Rows of prompts, and of drafts that requests brought."""

    @property
    def batch(self) -> int:
        """Number of sequences that decoded."""
        return len(self.rounds) + len(self.plain)

    @classmethod
    def of(cls, result: StepResult) -> "StepContents":
        rounds, plain, prefill_rows = [], [], 0
        for sequence_result in result.sequences:
            if sequence_result.verdict is None or sequence_result.sequence.draft is not None:
                prefill_rows += sequence_result.num_tokens + sequence_result.num_nodes
                continue
            prefill_rows += sequence_result.num_tokens - 1
            if sequence_result.num_reserved:
                rounds.append(sequence_result)
            else:
                plain.append(sequence_result.sequence)
        return cls(rounds, plain, prefill_rows)


def observe_rounds(
    rounds: Iterable[SequenceResult], class_of: Callable[[Sequence], TrafficClass], behind: Container[int]
) -> tuple[RoundObservation, ...]:
    """The outcomes of rounds, by traffic class. `behind` has the ids of sequences whose draft prefill goes on."""
    observed = []
    for sequence_result in rounds:
        assert sequence_result.verdict is not None
        sequence_id, path = sequence_result.sequence.id, sequence_result.verdict.path
        observed.append(
            RoundObservation(
                sequence_id,
                class_of(sequence_result.sequence),
                sequence_result.levels,
                len(path),
                sequence_result.num_reserved,
                sequence_result.num_nodes,
                path,
                sequence_id in behind,
            )
        )
    return tuple(observed)


def observe_step(
    result: StepResult, contents: StepContents, cost: StepCost, rounds: tuple[RoundObservation, ...]
) -> StepObservation:
    """The outcome and the cost of one step, whose rounds are observed as `rounds`."""
    return StepObservation(
        batch=contents.batch,
        rows=result.rows,
        prefill_rows=contents.prefill_rows,
        drafting=_drafting(contents.rounds, cost),
        verify_seconds=result.verify_seconds,
        network_seconds=cost.network_seconds,
        rounds=rounds,
        context=result.context,
        is_timed=cost.is_timed,
        slots=result.slots,
        host_seconds=cost.host_seconds,
        switch_on_seconds=cost.idle_seconds if rounds else 0.0,
    )


def _drafting(rounds: list[SequenceResult], cost: StepCost) -> tuple[DraftingObservation, ...]:
    """The deepest request and the cost of every method."""
    deepest: dict[str, int] = {}
    for sequence_result in rounds:
        method = sequence_result.sequence.method
        deepest[method] = max(deepest.get(method, 0), sequence_result.num_reserved)
    observed = []
    for method, depth in deepest.items():
        prefill = cost.prefills.get(method, NO_PREFILL)
        seconds = cost.draft_seconds.get(method, 0.0)
        observed.append(DraftingObservation(method, depth, seconds, prefill.tokens, prefill.seconds))
    return tuple(observed)
