"""Always the same depth: for measuring, and for those who know better."""

from collections.abc import Sequence

from paceline.speculation.depth.policy import Candidate, StepObservation


class FixedDepth:
    """`DepthPolicy`."""

    advantage: float | None = None

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def observe(self, step: StepObservation) -> None:
        pass

    def restart(self, category: str, alpha: float) -> None:
        pass

    def rests(self, batch: int) -> bool:
        return False

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        return [min(self._depth, candidate.max_depth) for candidate in batch]
