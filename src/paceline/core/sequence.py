"""One generation in flight. The scheduler places it, commit appends to it, the speculator sets its depth."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams, Verification


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Origin(Enum):
    """Where a committed token came from."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did for one sequence."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    """histogram[k]: rounds that accepted exactly k drafts."""

    def add(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """`ids` is prompt and output in one list; `num_computed` of them have their keys and values in the target's cache.

    There are no phases: a step computes up to `len(ids) - num_computed` tokens, and when that difference is closed the
    last row's logits give the next token. Decoding is a difference of one.
    """

    id: int
    request_id: str
    ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    speculation: SpeculationParams
    seed: int
    choice: int = 0
    """Which of the request's `n` alternatives this is."""
    category: str = "default"
    priority: int = 0
    """Lower is served first and preempted last."""
    arrival: float = 0.0
    cache_salt: str = ""
    method: str = ""
    verification: Verification = "coupled"
    eos_ids: frozenset[int] = frozenset()
    leader: "Sequence | None" = None
    """The first choice of the same request: its prompt is computed once and shared."""
    max_hit: int | None = None
    """See `Request.max_hit`."""

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    depth: int = 0
    """How many tokens to draft in the next round."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_preemptions: int = 0
    seated: float | None = None
    """When it first got a seat, on the clock of `arrival`."""

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def findable_ids(self) -> Seq[int]:
        """Those a prefix hit may cover, and one more."""
        return self.ids if self.max_hit is None else self.ids[: self.max_hit + 1]

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        return self.num_uncomputed > 1

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def output_ids(self) -> Seq[int]:
        return self.ids[self.num_prompt :]
