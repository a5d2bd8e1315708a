"""Drafts that are compared with the text and never verified: they show what drafts are worth while none are returned.

A verified draft slows the step of the whole batch; an unverified one takes the time of a lookup. A few sequences of the batch
are enough.
"""

from collections.abc import Mapping, Sequence

from paceline.speculation.depth.policy import RoundObservation
from paceline.vllm.decisions.record import category
from paceline.vllm.sequences import TrackedSequence

LEAST, SHARE = 4, 8
"""Sequences that are looked up: at least so many, and one of so many."""
FIRST_STEPS, MORE_STEPS = 3, 5
"""Steps after the start of a sequence in which drafts are compared, whatever they cost; and more while most are right."""


def sample_size(batch: int) -> int:
    return min(batch, max(LEAST, batch // SHARE))


def sample(batch: Sequence[TrackedSequence]) -> list[TrackedSequence]:
    """The sequences that are looked up; those that are already indexed first, then the newest."""
    return sorted(batch, key=lambda one: (not one.has_drafted, -one.id))[: sample_size(len(batch))]


class UnverifiedDrafts:
    def __init__(self, method: str, max_depth: int) -> None:
        self._method, self._max_depth = method, max_depth
        self._drafts: list[tuple[TrackedSequence, int, tuple[int, ...]]] = []
        """Sequence, its tokens when the draft was made, draft."""
        self._num_steps = 0
        """Steps that are still to be compared after the start of a sequence."""
        self._num_more = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the next step is to be compared, whatever that costs."""
        return self._num_steps > 0 or (self._num_more > 0 and bool(self._drafts))

    def start(self) -> None:
        """Sequences have started."""
        self._num_steps, self._num_more = FIRST_STEPS, MORE_STEPS

    def add(self, sequences: Sequence[TrackedSequence], drafts: Mapping[int, tuple[int, ...]]) -> None:
        """`drafts` by sequence were made for the sequences as they are now."""
        self._drafts = [(one, len(one.ids), drafts.get(one.id, ())) for one in sequences]
        self._num_steps = max(0, self._num_steps - 1)

    def compare(self) -> tuple[RoundObservation, ...]:
        """What the drafts would have gained, as far as the text is known by now. Each draft is compared once."""
        rounds = []
        for one, start, draft in self._drafts:
            text = one.ids[start : start + len(draft)]
            if draft and not text:
                continue
            accepted = next((i for i, token in enumerate(text) if token != draft[i]), len(text))
            drafted = len(text) if accepted == len(text) else len(draft)
            name = category(self._method, one.record.alpha)
            one.record.add(drafted, accepted)
            rounds.append(RoundObservation(one.id, name, drafted, accepted, self._max_depth))
        self._drafts = []
        num_right = sum(one.drafted == one.accepted > 0 for one in rounds)
        if self._num_more and not self._num_steps:
            is_right = 2 * num_right > len(rounds)
            self._num_steps, self._num_more = int(is_right), self._num_more - 1 if is_right else 0
        return tuple(rounds)

    def discard(self) -> None:
        self._drafts, self._num_steps = [], 0
