"""The interface of what drafts inside a graph step."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.draft_model import DraftModelProposer
from paceline.speculation.proposers.eagle import EagleProposer

GraphProposer = DraftModelProposer | EagleProposer
"""Proposers whose sequences a graph drafter can take over."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Draft tokens and levels of every slot in a step. Few shapes mean few graphs: shorter drafts are cut from a shape."""

    nodes: int
    levels: int


NO_DRAFTS = DraftShape(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DraftTensors:
    """Device memory that drafting writes and verification reads."""

    tokens: Tensor  # [B, N] int64
    # [B, N] int32. -1 marks a child of the last committed token. None if every draft is a chain.
    parents: Tensor | None


class GraphDrafter(Protocol):
    """Drafts for the slots of one batch. Its proposer owns the draft's block tables, and gets the sequences back when the
    batch returns to the host.

    `draft` and `follow` return functions to capture: they may read and write only memory at fixed addresses.
    """

    state_layers: tuple[int, ...]
    """Layers of the target whose hidden states `keep_states` reads."""
    table_width: int
    scratch_block: int
    """Block that padding writes to."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Tensors that `draft` and `follow` update in place; a capture saves and restores them."""
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

    def begin(self, shape: DraftShape) -> Literal["draft", "follow"] | None:
        """Which graph the step runs before verification."""
        ...

    def draft(self, shape: DraftShape) -> Callable[[], None]:
        """A function that writes `drafts(shape)`."""
        ...

    def follow(self) -> Callable[[], None]:
        """A function that computes the committed tokens without drafting."""
        ...

    def drafts(self, shape: DraftShape) -> DraftTensors: ...

    def keep_states(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        """Store the hidden states of the committed rows of a pass; part of the accept graph."""
        ...

    def return_sequences(self, running: Seq[Sequence]) -> None:
        """Return the running sequences to the proposer. No step is in flight."""
        ...
