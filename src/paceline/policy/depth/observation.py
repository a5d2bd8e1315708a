"""The interface of depth policies: observations go in, a depth for each sequence comes out. They read no clock and do no
I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.traffic import TrafficClass


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """One round of one sequence: the levels that its draft had, and how many of them the target accepted."""

    sequence_id: int
    traffic: TrafficClass
    drafted: int
    accepted: int
    requested: int = 0
    """Depth requested. A proposer may return less or nothing. 0 if there was no request, or if it is not known."""
    num_nodes: int | None = None
    """Number of nodes of a tree, whose `drafted` is its number of levels. None if the draft is a chain."""
    path: tuple[int, ...] | None = None
    """Accepted nodes of a tree, in draft order."""
    is_behind: bool = False
    """Whether the draft prefill of the sequence goes on. A round without a draft then says nothing about later rounds."""

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise ValueError(f"accepted must be in [0, drafted], got {self.accepted} of {self.drafted}")
        if self.path is not None and len(self.path) != self.accepted:
            raise ValueError(f"a path of {len(self.path)} nodes cannot be {self.accepted} accepted")

    @property
    def is_first_accepted(self) -> bool:
        """Whether the first drafted node was accepted."""
        return self.accepted > 0 and (self.path is None or self.path[0] == 0)

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted. Not alpha: the published rules compare this rate."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class DraftingObservation:
    """The drafts that one method was requested to make in a step."""

    method: str
    depth: int
    """Deepest draft requested, whether it came or not."""
    seconds: float
    prefill_tokens: int = 0
    """Tokens of draft prefill."""
    prefill_seconds: float = 0.0
    """Time of draft prefill; not part of `seconds`."""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One engine step. Seconds are time that the step waited: work hidden behind the target's pass costs nothing."""

    batch: int
    """Sequences that decoded in this step."""
    rows: int
    """Target rows of those sequences, drafts included; `num_slots` if nothing was drafted."""
    prefill_rows: int
    drafting: tuple[DraftingObservation, ...]
    """Drafts by method; empty for a plain step."""
    verify_seconds: float
    network_seconds: float
    rounds: tuple[RoundObservation, ...]
    is_timed: bool = True
    """Whether its seconds are typical of later steps. An untimed step reports acceptance and no cost."""
    context: int = 0
    """Tokens of the sequences that decoded; a pass reads them all."""
    slots: int | None = None
    """Slots of a padded batch, all of them counted in `rows`. None if the batch is ragged."""
    host_seconds: float | None = None
    """Time of the host between the pass of the previous step and the beginning of this one, without drafting. None if the
    engine was idle in between, or if the previous step did not run on the host."""
    switch_on_seconds: float = 0.0
    """Time in which the device was idle before this step because the step drafts and the previous steps did not."""

    @property
    def num_slots(self) -> int:
        """Sequences that the pass had rows for."""
        return self.batch if self.slots is None else self.slots

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        drafting = sum(drafting.seconds + drafting.prefill_seconds for drafting in self.drafting)
        return self.switch_on_seconds + self.verify_seconds + self.network_seconds + drafting


class DepthCandidate(NamedTuple):
    """A sequence about to decode. `max_depth` is the smallest limit of request, server and breaker; 0 forbids drafting."""

    sequence_id: int
    traffic: TrafficClass
    max_depth: int
    num_tokens: int = 0
    """Tokens of the sequence, its prompt included."""
    remaining: int | None = None
    """Tokens that the sequence may still generate. None if it is not known."""
    num_prompt: int = 0
    """Tokens of its prompt. 0 if it is not known."""


class DepthPolicy(Protocol):
    @property
    def advantage(self) -> float | None:
        """Expected speed of drafting over plain decoding at the last decision; None for a policy that has no estimate."""
        ...

    def observe(self, step: StepObservation) -> None:
        """Learn from a committed step."""
        ...

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        """Discard what was learned of the traffic class; `alpha` is the new acceptance of its first drafts."""
        ...

    def expect_prompts(self, rows: int) -> None:
        """Prompt rows that are still to be computed at the next decision: their sequences join the batch soon."""
        ...

    def skip_step(self, batch: int) -> bool:
        """Whether this step of `batch` sequences is plain without a decision. `decide` is then not called for it; it costs
        time for every candidate."""
        ...

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
        """A depth for each candidate, in order, between 0 and its `max_depth`. Called once a step with all sequences that
        decode."""
        ...
