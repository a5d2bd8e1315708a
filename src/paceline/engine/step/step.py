"""What the scheduler, the executors and the committer exchange about one step.

`Schedule` is what the scheduler decided for the step. `StepExecutor` is the interface of the two executors, and `StepResult` is
what every step returns. `HostReason` says why a step ran on the host: its values are the labels of `ExecutorSelector.counts`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.core.output import StepTimes, TokenLogprobs
from paceline.core.sequence import Sequence
from paceline.speculation import HiddenRows
from paceline.speculation.drafts import Draft
from paceline.speculation.verification import Verdict


class Scheduled(NamedTuple):
    """The step computes `num_tokens` committed tokens of `sequence` and verifies at most `num_draft` drafted ones."""

    sequence: Sequence
    num_tokens: int
    num_draft: int

    @property
    def completes(self) -> bool:
        """Whether the step reaches the newest token, so that its logits give the next one."""
        return self.num_tokens == self.sequence.num_uncomputed


@dataclass(frozen=True, slots=True)
class Schedule:
    items: tuple[Scheduled, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Committed tokens that the step computes."""
        return sum(item.num_tokens for item in self.items)


GRAPH = "graph"


class HostReason(StrEnum):
    """Why the host executor takes a step."""

    NO_GRAPHS = "no_graphs"
    """The engine has no graph executor: no GPU, or several ranks."""
    IDLE = "idle"
    """No sequence ran; the step starts the first one."""
    RESIZE = "resize"
    """The batch fits half the slots."""
    ADMISSION = "admission"
    """A waiting sequence is admitted to a batch that drafts."""
    PREFILL = "prefill"
    """A sequence has prompt tokens to compute, and no mixed step can compute them."""
    SAMPLING = "sampling"
    """A request has a grammar, prompt scores to compute, or longer lists than the kernels take; or a few requests verify drafts
    by rejection, and no others run."""
    PROPOSER = "proposer"
    """A sequence drafts with a proposer that cannot run inside a graph."""
    DRAFT_BEHIND = "draft_behind"
    """The draft has to compute tokens of a sequence first."""
    FEW_DRAFTS = "few_drafts"
    """So few sequences draft that a ragged pass is cheaper."""
    WINDOW = "window"
    """A sequence may reach `max_model_len` in the step."""
    BLOCKS = "blocks"
    """The cache has too few free blocks for the step."""


def needs_logits(sequence: Sequence) -> bool:
    """Whether a host step returns its logits, modifies them before a token is picked, or verifies by probabilities."""
    params = sequence.sampling
    return (
        (sequence.verification != "coupled" and not params.is_greedy)
        or params.logprobs is not None
        or params.has_penalties
        or bool(params.logit_bias)
        or (sequence.num_output < params.min_tokens and bool(params.blocked_ids))
        or sequence.needs_prompt_scores
    )


NO_DRAFT = Draft()
PICKING_BYTES = 160 << 20
"""Memory for sampling: sorting a vocabulary takes 40 bytes a logit."""


class SequenceResult(NamedTuple):
    """What one step computed for one sequence."""

    sequence: Sequence
    num_tokens: int
    """Committed tokens whose KV the step computed; 1 in decoding."""
    verdict: Verdict | None
    """The accepted draft tokens and the next token. None if the step computed only part of a prompt."""
    num_reserved: int = 0
    """Draft tokens that the schedule reserved."""
    num_nodes: int = 0
    """Draft tokens that were verified."""
    levels: int = 0
    """Longest path of the draft."""
    draft: Draft = NO_DRAFT
    """The draft itself, from the host executor; a graph step leaves it on the device."""
    logits: Tensor | None = None
    """[1 + num_nodes, V], if the request or a hook needs them."""
    scores: tuple[TokenLogprobs, ...] | None = None
    """Log-probabilities of the tokens of the verdict, if a graph step computed them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the verdict."""
        return self.verdict.tokens if self.verdict is not None else ()

    @property
    def accepted(self) -> int:
        return len(self.verdict.path) if self.verdict is not None else 0


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step computed and what it cost, from either executor. Commit, learning and hooks read nothing else."""

    sequences: Seq[SequenceResult]
    times: StepTimes
    forward_seconds: float
    """The target's pass."""
    verify_seconds: float
    """The target's pass and the verification of its logits."""
    rows: int
    """Rows of the pass that decode or verify, padding included."""
    context: int
    """Committed tokens of the sequences that decode."""
    draft_seconds: float | None = None
    """Time of drafting inside a graph. None if the speculator measured it while proposing."""
    slots: int | None = None
    """Number of slots of a padded pass. None if the pass is ragged."""
    is_timed: bool = True
    """False if the step did something for the first time, such as a capture."""
    is_graph: bool = False
    """Whether the graph executor ran the step; a later step that is in flight writes to the blocks reserved for it."""
    hidden: Mapping[int, HiddenRows] = field(default_factory=dict)
    """Hidden states of committed tokens by sequence, for proposers that draft from them."""

    @property
    def num_tokens(self) -> int:
        """Committed tokens computed, prompts included."""
        return sum([sequence.num_tokens for sequence in self.sequences])


class StepDrafts:
    """The drafts of a step, in the form of the executor that runs it."""

    __slots__ = ()


class StepExecutor(Protocol):
    """Runs scheduled steps. `submit` starts one, `collect` returns the oldest that is complete, `prepare_next` follows the
    commit of every collected step."""

    def propose(self, schedule: Schedule) -> StepDrafts:
        """Drafts for a schedule of this executor, for its `submit`."""
        ...

    def submit(self, schedule: Schedule, drafts: StepDrafts) -> None:
        """Start the target's pass over the scheduled tokens and the drafts."""
        ...

    def collect(self) -> StepResult | None:
        """The oldest submitted step, verified. None if it stays in flight while the next step is submitted."""
        ...

    def prepare_next(self, result: StepResult) -> None:
        """The result is committed and learned from: decide the next depths and inform the proposers."""
        ...


class GraphStepExecutor(StepExecutor, Protocol):
    """The executor of steps that the device runs as graphs, one step ahead of the host."""

    num_steps: int
    """Steps collected."""

    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs that any traffic needs."""
        ...

    def draft_seconds(self, size: int) -> dict[int, float]:
        """{draft tokens of a sequence: seconds of drafting} in steps of about `size` sequences."""
        ...

    @property
    def is_loaded(self) -> bool:
        """Whether it holds sequences."""
        ...

    @property
    def num_inflight(self) -> int:
        """Steps that are submitted and not collected."""
        ...

    @property
    def seconds_to_spare(self) -> float:
        """How long the host can wait for requests before it submits the next step."""
        ...

    def schedule(self, can_prefill: bool = True) -> Schedule | HostReason | None:
        """The next step, or why the host executor has to take it. None if the step in flight is collected first."""
        ...

    def drain(self) -> None:
        """Submit nothing more: `collect` returns the step in flight, then the host executor continues."""
        ...

    def sync_to_host(self) -> None:
        """Hand the sequences back to the host executor. No step is in flight."""
        ...

    def release(self) -> None:
        """Give up all sequences and the steps in flight, of which nothing is committed."""
        ...

    def yield_to_host(self) -> None:
        """The host executor takes the next step."""
        ...
