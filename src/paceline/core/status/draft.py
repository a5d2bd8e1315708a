"""Status of drafts: draft workers as a target sees them, and the draft inside an engine."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class GoodputSums:
    """Sums over sequences of the tokens that were committed and the seconds that their steps took."""

    sequences: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0
    """Sum of tokens times seconds."""

    @property
    def goodput(self) -> float:
        """Tokens per second of one sequence."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def with_sequence(self, tokens: float, seconds: float) -> "GoodputSums":
        """The sums with one more sequence."""
        return self + GoodputSums(1, tokens, seconds, tokens * tokens, seconds * seconds, tokens * seconds)

    def __add__(self, other: "GoodputSums") -> "GoodputSums":
        return GoodputSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: "GoodputSums") -> "GoodputSums":
        """The sequences after `before`; all if counting started again since."""
        if self.sequences < before.sequences:
            return self
        return GoodputSums(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """A draft worker as one target sees it."""

    name: str
    state: str
    sequences: int
    """Sequences of this target that are open there."""
    queue_seconds: float
    """Drafting time queued there."""
    round_trip: float
    """Recent round trip, seconds."""
    answers: int
    """Rounds it has drafted."""
    hits: int
    """Rounds drafted before they were requested."""
    late: int
    """Rounds whose draft missed the deadline."""
    pass_seconds: float = 0.0
    """Recent time of one pass over its model. 0 if it is not known."""
    paused_share: float | None = None
    """Share of drafts that were ready when it paused drafting ahead for this target. None if it drafts ahead."""
    refusal: str = ""
    """Why the draft does not fit the target, if it does not."""
    goodput: GoodputSums = GoodputSums()
    """Sequences of this target that it drafted for, since the connection was made."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What one of the two drafts of a trial inside an engine was measured on."""

    sequences: int = 0
    periods: int = 0
    goodput: float = 0.0
    """Tokens per second of one sequence. 0 if it was not measured."""


@dataclass(frozen=True, slots=True)
class DraftSwapStatus:
    """The last swap of the draft inside an engine."""

    number: int
    """Number that the gateway gave the swap."""
    candidate: str
    """The new draft, as it was named."""
    verdict: str
    """`continue` while the new draft loads or is tried, then `keep` or `roll back`; see `cluster/pairing/draft_trial.py`."""
    reason: str
    gain: float | None = None
    """Relative gain in goodput, 0.1 for 10% more. None if it is not known."""
    of_current: DraftCounts = DraftCounts()
    of_candidate: DraftCounts = DraftCounts()


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """The draft inside an engine whose weights can be exchanged."""

    draft: str
    """Name or folder of the draft in use. Until a new draft is kept, it is the old draft."""
    method: str
    swap: DraftSwapStatus | None = None
    """The last swap. None if there was no swap since the start."""
