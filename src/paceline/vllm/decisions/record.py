"""How often the drafts of one sequence were right."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from paceline.core.traffic import TrafficClass

WINDOW = 16.0
"""Draft tokens that a record remembers."""
PRIOR_ALPHA = 0.2
PRIOR_TRIALS = 1.0
CLASSES = (("good", 0.6), ("fair", 0.3), ("poor", 0.0))
"""Categories of sequences, with the least alpha of each."""


@dataclass(slots=True)
class DraftRecord:
    num_trials: float = 0.0
    """Draft tokens that were compared with the text, decayed."""
    num_hits: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens, of which the first `accepted` were right. A lookup without a draft is a failure."""
        trials = max(1, min(drafted, accepted + 1))
        kept = min(1.0, WINDOW / (self.num_trials + trials))
        self.num_trials = self.num_trials * kept + trials
        self.num_hits = self.num_hits * kept + accepted

    def tokens(self, depth: int) -> float:
        """Expected tokens of a step with a draft of `depth` tokens."""
        return sum(self.alpha**k for k in range(depth + 1))

    @property
    def alpha(self) -> float:
        """Probability that a draft token after right tokens is right."""
        return (self.num_hits + PRIOR_ALPHA * PRIOR_TRIALS) / (self.num_trials + PRIOR_TRIALS)


def traffic_classes(method: str, batch: Sequence[DraftRecord]) -> list[TrafficClass]:
    """Traffic classes of the depth policy, by how good the drafts of each sequence were. A sequence without a record counts as
    the median of the remaining sequences, because the texts of a batch are often of one kind."""
    typical = median_low([record.alpha for record in batch if record.num_trials] or [PRIOR_ALPHA])
    return [traffic_class(method, record.alpha if record.num_trials else typical) for record in batch]


def traffic_class(method: str, alpha: float) -> TrafficClass:
    return TrafficClass(method, next(name for name, least in CLASSES if alpha >= least))
