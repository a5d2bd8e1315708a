"""What drafts inside a graph step: the interface `GraphDrafter`, and the draft prefills of its sequences.

`DraftPrefills` computes the drafts' caches of sequences that join a batch, or whose drafts are behind. Draft prefills run at
the same time as the target's pass, in their own stream.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.graph.slot_params import Sampling
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.models.device import SideStream, StreamEvent
from paceline.models.runner import Span
from paceline.models.runner.gpu import MAX_RAGGED_ROWS, GpuRunner, MixedPasses
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.eagle import EagleProposer
from paceline.speculation.proposers.model import Chunk, DraftModelProposer, DraftSequence, ModelDrafter

GraphProposer = DraftModelProposer | EagleProposer
"""Proposers whose sequences a graph drafter can take over."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Draft tokens and levels of every slot in a step. Few shapes mean few graphs: shorter drafts are cut from a shape."""

    nodes: int
    levels: int


NO_DRAFTS = DraftShape(0, 0)


class DraftPart(NamedTuple):
    """A graph of drafting."""

    name: Literal["draft", "extend", "follow"]
    """`draft` begins a round, `extend` adds a token to every draft, `follow` computes the committed tokens without drafting."""
    shape: DraftShape


@dataclass(frozen=True, slots=True, eq=False)
class DraftTensors:
    """Device memory that drafting writes and verification reads."""

    tokens: Tensor  # [B, N] int64, perhaps columns of a wider tensor
    # [B, N] int32. -1 marks a child of the last committed token. None if every draft is a chain.
    parents: Tensor | None


class GraphDrafter(Protocol):
    """Drafts for the slots of one batch. Its proposer owns the draft's block tables, and gets the sequences back when the
    batch returns to the host.

    `work` returns functions to capture: they may read and write only memory at fixed addresses.
    """

    state_layers: tuple[int, ...]
    """Layers of the target whose hidden states `keep_states` reads."""
    table_width: int
    scratch_block: int
    """Block that padding writes to."""
    edits_logits: bool
    """Whether it drafts from logits with the biases and penalties of the slots."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Tensors that the parts update in place; a capture saves and restores them."""
        ...

    @property
    def wants_states(self) -> bool:
        """Whether the next steps must call `keep_states`."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is up to date, so that steps without drafts leave the drafter unchanged."""
        ...

    def bind(self, tables: Tensor) -> None:
        """Set the draft's block tables [B, table_width], which the host writes before every step."""
        ...

    def shape(self, depth: int) -> DraftShape:
        """The shape for sequences of up to `depth` draft tokens. It may have fewer nodes, or more."""
        ...

    def load(self, sequences: Seq[Sequence]) -> DraftPrefill:
        """Take these sequences over, in slot order, as far as the proposer can bring them up to date; returns the cost."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences have left their slots."""
        ...

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the draft's cache holds the sequence, or can after a draft prefill on the host."""
        ...

    def can_draft(self, sequences: Seq[Sequence]) -> bool:
        """Whether every sequence with a depth is up to date."""
        ...

    def reserve_blocks(self, sequence: Sequence, num_tokens: int, shape: DraftShape) -> Seq[int] | None:
        """The draft's blocks for a step that ends at `num_tokens` at most. None if the sequence gets no drafts."""
        ...

    def begin(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        """Which graphs the step runs before verification, in their order."""
        ...

    def parts(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        """The graphs of drafts of this shape."""
        ...

    def work(self, part: DraftPart, sampling: Sampling) -> Callable[[], None]:
        """The function of a graph, with kernels that serve slots of this sampling."""
        ...

    def drafts(self, shape: DraftShape) -> DraftTensors:
        """What the graphs of this shape write."""
        ...

    def keep_states(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        """Store the hidden states of the committed rows of a pass; part of the accept graph."""
        ...

    def return_sequences(self, running: Seq[Sequence]) -> None:
        """Return the running sequences to the proposer. No step is in flight."""
        ...


class DraftPrefills:
    def __init__(self, drafter: ModelDrafter[Tensor], max_sequences: int) -> None:
        runner = drafter.runner
        assert isinstance(runner, GpuRunner)
        self._drafter, self._device = drafter, runner.device
        # Larger passes have no graph, and launching them takes longer than a small model computes
        self._max_rows = min(drafter.max_rows, MAX_RAGGED_ROWS)
        self._passes = MixedPasses(runner, self._max_rows, max_sequences)
        self._stream = SideStream(runner.device)

    def warm_up(self) -> None:
        """Load the kernels of all passes."""
        now, done = StreamEvent(self._device), StreamEvent(self._device)
        now.record()
        with self._stream.after(now):
            for rows in sorted({min(self._max_rows, 1 << n) for n in range(7, self._max_rows.bit_length() + 1)}):
                self._passes.load_kernels(rows, with_drafts=False)
            done.record()
        done.wait()

    def submit(self, sequences: Seq[DraftSequence], after: StreamEvent, num_left: int) -> StreamEvent:
        """Compute all tokens of these sequences but the last `num_left`, behind `after`, the last use of the draft model. Their
        blocks are reserved. Returns the end, for which the next use of the draft model has to wait. The depth policy gets no
        cost: the target's pass hides it, and the time between begin and end is mostly that of the pass."""
        end = StreamEvent(self._device)
        with self._stream.after(after):
            self._compute(sequences, num_left)
            end.record()
        return end

    def _compute(self, sequences: Seq[DraftSequence], num_left: int) -> None:
        """Queue the passes."""
        drafter = self._drafter
        spans, room = list[Span](), self._max_rows
        for sequence in sequences:
            while (missing := sequence.num_missing - num_left) > 0:
                chunk = Chunk(sequence, min(missing, room))
                spans.append(drafter.span(chunk))
                drafter.advance(chunk)
                room -= chunk.num_tokens
                if room == 0:
                    self._passes.prefill(spans)
                    spans, room = [], self._max_rows
        if spans:
            self._passes.prefill(spans)
