"""What drafts on the device, inside a round: the interface that a batch runs, whatever the method."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.speculation.proposers.draft_model import DraftModelProposer
from paceline.speculation.proposers.eagle import EagleProposer

DeviceProposer = DraftModelProposer | EagleProposer
"""Proposers that lend their sequences to a drafter on the device."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How large a round's drafts are. Few shapes, few graphs: a sequence that wants less has the rest cut off."""

    nodes: int
    levels: int


NOTHING = DraftShape(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Memory that drafting writes and verification reads."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor | None  # [B, N] int32, -1 the last committed token; None: every draft is a chain


class DeviceDrafter(Protocol):
    """Drafts for the seats of one batch. Its proposer keeps the books, and has the sequences back when the batch comes home.

    `draft` and `follow` return work for a graph: it may read and write only memory that stays where it is.
    """

    capture: tuple[int, ...]
    """The target's layers whose states `keep` wants."""
    table_width: int
    scratch_block: int
    """Where padding writes."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What `draft` and `follow` move on, besides what they write."""
        ...

    @property
    def wants_states(self) -> bool:
        """Whether rounds are to `keep` any now."""
        ...

    def bind(self, tables: Tensor) -> None:
        """Blocks [B, table_width] of what the drafter caches, written before every round."""
        ...

    def shape(self, depth: int) -> DraftShape:
        """For sequences that want up to `depth` nodes; it may hold fewer, or more."""
        ...

    def board(self, sequences: Seq[Sequence]) -> None:
        """Borrow these, in this order, as far as the proposer is up to date with them."""
        ...

    def has_room(self, sequence: Sequence) -> bool:
        """Whether it is up to date, or could be if the host caught it up."""
        ...

    def can_draft(self, sequences: Seq[Sequence]) -> bool:
        """For those of them that want drafts."""
        ...

    def lend(self, sequence: Sequence, num_tokens: int, shape: DraftShape) -> Seq[int] | None:
        """Blocks for a round of that shape which ends at `num_tokens` at most; None: no drafts for this sequence."""
        ...

    def begin(self, shape: DraftShape) -> Literal["draft", "follow"] | None:
        """What a round has to run before it verifies."""
        ...

    def draft(self, shape: DraftShape) -> Callable[[], None]:
        """Write `drafts(shape)`."""
        ...

    def follow(self) -> Callable[[], None]:
        """Take in what was committed, without drafting."""
        ...

    def drafts(self, shape: DraftShape) -> Drafts: ...

    def keep(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        """Part of a round's end: the states of the pass, and which of its rows were committed."""
        ...

    def take_back(self, running: Seq[Sequence]) -> None:
        """Give those that are still running back to the proposer. No round is under way."""
        ...
