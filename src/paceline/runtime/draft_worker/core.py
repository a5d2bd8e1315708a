"""Interface between a draft worker and the model that drafts for it: one pass computes the next token of many branches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.runtime.draft_worker.distributions import DraftDistribution
from paceline.speculation.proposers.model_drafter import DraftSequence


@dataclass(frozen=True, slots=True)
class DraftedToken:
    token: int
    alternatives: tuple[int, ...] = ()
    """Tokens that the target may choose instead, most likely first. Under rejection `token` may be among them."""
    distribution: DraftDistribution | None = None
    gap: float | None = None
    """Score of `token` less the best score of all other tokens, in logits with the target's noise. None if it is unknown, as
    under rejection."""


@dataclass(slots=True, eq=False)
class DraftBranch(DraftSequence):
    """A text that a draft worker drafts: the main branch of a sequence, or one for a possible outcome."""

    chain: list[DraftedToken] = field(default_factory=list, init=False)
    """Drafted tokens after the committed tokens. In a branch they follow the outcome that it assumes."""
    is_ranked: bool = field(default=True, init=False)
    """Whether drafted tokens need alternatives and score gaps, from which outcomes are prepared. A backend may rank the tokens
    of other branches too."""
    num_idle_passes: int = field(default=0, init=False)
    """Passes since the last drafted token."""

    def append(self, drafted: DraftedToken | None) -> None:
        if drafted is None:
            self.num_idle_passes += 1
            return
        self.num_idle_passes = 0
        self.chain.append(drafted)
        self.ids.append(drafted.token)


class DraftBackend(Protocol):
    """Computes drafted tokens. It computes nothing for a branch before the first `step` with it."""

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        """The token after each branch's `ids`. None if the prompt is not computed yet, or if the cache has no free block."""
        ...

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        """Share with `child` the cache of the tokens that the two branches have in common."""
        ...

    def truncate(self, branch: DraftBranch, length: int) -> None:
        """Drop all tokens of `branch` after `length`. Close its children first."""
        ...

    def close(self, branches: Sequence[DraftBranch]) -> None:
        """Free the blocks of these branches."""
        ...
