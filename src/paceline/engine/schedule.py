"""What the scheduler decided for one step."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.sequence import Sequence


class Scheduled(NamedTuple):
    """The step computes `num_tokens` committed tokens of `sequence` and verifies at most `num_draft` drafted ones."""

    sequence: Sequence
    num_tokens: int
    num_draft: int

    @property
    def completes(self) -> bool:
        """Whether the step reaches the newest token, so that its logits give the next one."""
        return self.num_tokens == self.sequence.num_uncomputed


@dataclass(frozen=True, slots=True)
class Schedule:
    items: tuple[Scheduled, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Committed tokens that the step computes."""
        return sum(item.num_tokens for item in self.items)
