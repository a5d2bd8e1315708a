"""Drafts that are compared with the text and never verified. They show what drafts are worth while none are returned.

A verified draft slows the step of the whole batch; an unverified draft takes the time of a lookup. A few sequences of the batch
are enough.
"""

from collections.abc import Mapping, Sequence

from paceline.speculation.depth.policy import RoundObservation
from paceline.vllm.decisions.record import traffic_class
from paceline.vllm.sequences import TrackedSequence

LEAST, SHARE = 4, 8
"""At least `LEAST` sequences are looked up, and one of `SHARE`."""
FIRST_STEPS, MORE_STEPS = 3, 5
"""Steps after the start of a sequence in which drafts are compared, whatever they cost. `MORE_STEPS` follow while most drafts
are right."""


def sample_size(batch: int) -> int:
    return min(batch, max(LEAST, batch // SHARE))


def sample(batch: Sequence[TrackedSequence]) -> list[TrackedSequence]:
    """The sequences that are looked up. Those that are already indexed come first, then the newest."""
    return sorted(batch, key=lambda sequence: (not sequence.has_drafted, -sequence.id))[: sample_size(len(batch))]


class UnverifiedDrafts:
    def __init__(self, method: str, max_depth: int) -> None:
        self._method, self._max_depth = method, max_depth
        self._drafts: list[tuple[TrackedSequence, int, tuple[int, ...]]] = []
        """The sequence, its number of tokens when the draft was made, and the draft."""
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
        self._drafts = [(sequence, len(sequence.ids), drafts.get(sequence.id, ())) for sequence in sequences]
        self._num_steps = max(0, self._num_steps - 1)

    def compare(self) -> tuple[RoundObservation, ...]:
        """What the drafts would have gained, as far as the text is known by now. Each draft is compared once."""
        rounds = []
        for sequence, start, draft in self._drafts:
            text = sequence.ids[start : start + len(draft)]
            if draft and not text:
                continue
            accepted = next((i for i, token in enumerate(text) if token != draft[i]), len(text))
            drafted = len(text) if accepted == len(text) else len(draft)
            traffic = traffic_class(self._method, sequence.record.alpha)
            sequence.record.add(drafted, accepted)
            rounds.append(RoundObservation(sequence.id, traffic, drafted, accepted, self._max_depth))
        self._drafts = []
        num_right = sum(round_.drafted == round_.accepted > 0 for round_ in rounds)
        if self._num_more and not self._num_steps:
            is_right = 2 * num_right > len(rounds)
            self._num_steps, self._num_more = int(is_right), self._num_more - 1 if is_right else 0
        return tuple(rounds)

    def discard(self) -> None:
        self._drafts, self._num_steps = [], 0
