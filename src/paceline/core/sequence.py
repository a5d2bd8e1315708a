"""One running generation. The scheduler places it, commit appends to it, the speculator sets its depth."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from paceline.core.request import SamplingParams, SpeculationParams, Verification

BLOCK_SIZE = 16
"""Tokens per cache block."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Origin(Enum):
    """How a committed token was produced."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(slots=True)
class SpeculationCounts:
    """Speculation counters of one sequence."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    """`histogram[k]`: rounds in which exactly k drafted tokens were accepted."""

    def add(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """`ids` holds prompt and output; the keys and values of the first `num_computed` are in the target's cache.

    There is no prefill phase: a step computes up to `len(ids) - num_computed` tokens. Once all are computed, the logits of
    the last row give the next token. Decoding is a difference of one.
    """

    id: int
    request_id: str
    ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    speculation: SpeculationParams
    seed: int
    choice: int = 0
    """Index among the request's `n` choices."""
    category: str = "default"
    priority: int = 0
    """Priority; a lower number is scheduled first and preempted last."""
    arrival: float = 0.0
    tenant: str = ""
    """See `Request.tenant`."""
    weight: float = 1.0
    """See `Request.weight`."""
    cache_salt: str = ""
    method: str = ""
    verification: Verification = "coupled"
    eos_ids: frozenset[int] = frozenset()
    leader: "Sequence | None" = None
    """First choice of the same request, which computes the prompt for all choices."""
    max_cached_tokens: int | None = None
    """See `Request.max_cached_tokens`."""
    draft: tuple[int, ...] | None = None
    """See `Request.draft`."""

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    depth: int = 0
    """Tokens to draft in the next round."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_preemptions: int = 0
    started: float | None = None
    """Time of its first scheduled step, on the clock of `arrival`."""

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def cacheable_ids(self) -> Seq[int]:
        """Tokens that a prefix-cache hit may cover, and one more, which has to be computed."""
        return self.ids if self.max_cached_tokens is None else self.ids[: self.max_cached_tokens + 1]

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        return self.num_uncomputed > 1

    @property
    def needs_prompt_scores(self) -> bool:
        """Whether its next pass computes prompt tokens whose log-probabilities the request wants."""
        return (
            self.sampling.prompt_logprobs is not None and self.choice == 0 and self.num_computed < self.num_prompt - 1
        )

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def output_ids(self) -> Seq[int]:
        return self.ids[self.num_prompt :]
