"""The one interface of every way to guess."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.speculation import Verification
from paceline.speculation.drafts import DraftBatch


@dataclass(frozen=True, slots=True)
class HiddenRequest:
    """Which of the target's hidden states a method drafts from."""

    layers: tuple[int, ...] = ()
    """Counted as `DecoderModel.forward(capture=...)` counts them: layers passed."""
    last: bool = False
    """The last one, after the final norm."""


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """The target's hidden states of n consecutive committed tokens, the first of them at position `start`."""

    start: int
    inner: Mapping[int, Tensor]  # layer -> [n, D]
    last: Tensor | None  # [n, D], after the final norm

    @property
    def end(self) -> int:
        rows = self.last if self.last is not None else next(iter(self.inner.values()))
        return self.start + len(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What a proposer learns about one sequence after a commit."""

    sequence_id: int
    ids: Seq[int]
    """All committed tokens, prompt included. A live view: read it, never keep a copy of it or write to it."""
    depth: int
    """How many tokens to draft next; 0 asks for nothing and should cost nothing."""
    sampling: SamplingParams
    seed: int
    choice: int
    num_prompt: int
    verification: Verification
    cache_salt: str = ""
    """Sequences with different salts share no cached prefix, in a draft's cache either."""
    hidden: Hidden | None = None
    """Of the tokens that this step computed and committed, for a proposer that `wants` them. Tokens that came from the
    prefix cache, or were computed while speculation was off, have none: positions may skip."""
    picks: Seq[int] = ()
    """The target's picks of the round just verified: after the last token that was committed before it, then after each node
    of the draft that this proposer gave, as far as it was verified. None under rejection sampling, where they would be draws:
    what is drafted next may not depend on the target's randomness."""
    max_levels: int | None = None
    """The longest path that is of use: the request may have one token more, which is the target's own. None: not known."""

    @classmethod
    def of(cls, sequence: Sequence, max_levels: int, hidden: Hidden | None = None, picks: Seq[int] = ()) -> "Progress":
        return cls(
            sequence_id=sequence.id,
            ids=sequence.ids,
            depth=sequence.depth,
            sampling=sequence.sampling,
            seed=sequence.seed,
            choice=sequence.choice,
            num_prompt=sequence.num_prompt,
            verification=sequence.verification,
            cache_salt=sequence.cache_salt,
            hidden=hidden,
            picks=picks,
            max_levels=max_levels,
        )


class Proposer(Protocol):
    """Guesses the next tokens. State per sequence is the proposer's own business and ends with `close`.

    A proposer may answer with fewer tokens than asked for, or none. Whatever it answers, the text stays the target's: it can
    cost speed, never correctness, provided `DraftBatch.probs` are what its tokens were really drawn from.

    A proposer that drafts from the target's hidden states says so in an attribute `wants`, a `HiddenRequest`. It then hears of
    prompts too, chunk by chunk as they are computed, with depth 0.

    One that fills a tree with as many nodes as it is granted says so in an attribute `forks`, which is true. A request's last
    tokens bound how deep it drafts, `Progress.max_levels`, and not how many nodes it is granted.

    One that has nothing to learn from a sequence which it is not asked to draft for says so in an attribute `hears_when_asked`,
    which is true, and does not hear of it.

    One with a cache of its own, which first reads what was written without it, adds that up in an attribute `reading`, a
    `Reading`.

    One that drafts across a network says in an attribute `network_seconds` how much of its last `collect` went by on the way.
    """

    def observe(self, batch: Seq[Progress]) -> None:
        """Hear what was committed and what is wanted next; may start work, must not block on it."""
        ...

    def collect(self, sequence_ids: Seq[int], deadline: float) -> DraftBatch:
        """Drafts for those of `sequence_ids` that are ready by `deadline` (seconds on the engine's clock)."""
        ...

    def close(self, sequence_ids: Seq[int]) -> None:
        """Forget these sequences and free what they held."""
        ...


def hidden_wanted(proposer: Proposer) -> HiddenRequest | None:
    """What the proposer's `wants` says; most have none."""
    wants: HiddenRequest | None = getattr(proposer, "wants", None)
    return wants


def forks(proposer: Proposer) -> bool:
    """What the proposer's `forks` says; most draft chains."""
    said: bool = getattr(proposer, "forks", False)
    return said


def hears_when_asked(proposer: Proposer) -> bool:
    """What the proposer's `hears_when_asked` says; most hear everything."""
    said: bool = getattr(proposer, "hears_when_asked", False)
    return said


def network_seconds(proposer: Proposer) -> float:
    """What the proposer's `network_seconds` says; most have none."""
    seconds: float = getattr(proposer, "network_seconds", 0.0)
    return seconds
