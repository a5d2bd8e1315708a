"""One sequence as the pool proposer sees it."""

from dataclasses import dataclass, field

from paceline.runtime.draft_link import DraftLink
from paceline.runtime.messages import Branch, Open, Rule, Sampling
from paceline.runtime.pooled_drafts import Chain
from paceline.speculation.proposer import Progress


@dataclass(slots=True, eq=False)
class PoolRider:
    """Where it is open, what the worker there knows of it, and what came back."""

    progress: Progress
    link: DraftLink | None = None
    known: int = 0
    """Tokens that the worker has been told of."""
    round: int = 0
    asked: int = 0
    """Depth of the round under way; 0: nothing was asked for, or it is settled."""
    asked_at: float = 0.0
    chain: Chain | None = None
    offered: tuple[int, ...] = ()
    branches: dict[tuple[int, int], Branch] = field(default_factory=dict)
    """Drafts for outcomes of the round under way, or the word that they are being made."""
    outcome: tuple[int, int] | None = None
    """(accepted, token that followed) of the round before."""
    is_missed: bool = False
    """The worker was not prepared for that outcome: it has to draft afresh."""

    @property
    def wants_law(self) -> bool:
        return self.progress.verification == "rejection" and not self.progress.sampling.is_greedy


def opening(progress: Progress, epoch: int) -> Open:
    """All that a draft worker needs to know of a sequence."""
    s = progress.sampling
    return Open(
        epoch=epoch,
        sequence=progress.sequence_id,
        ids=list(progress.ids),
        num_prompt=progress.num_prompt,
        sampling=Sampling(
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            dict(s.logit_bias),
        ),
        seed=progress.seed,
        choice=progress.choice,
        rule=Rule.REJECTION if progress.verification == "rejection" else Rule.COUPLED,
        salt=progress.cache_salt,
    )
