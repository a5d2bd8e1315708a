"""A round under way on the device, and what it brings when it lands."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.core.output import StepTimes
from paceline.engine.executors.graph.drafter import DraftShape
from paceline.models.cuda_graph import Stamp, staging


@cache
def chain_path(accepted: int) -> tuple[int, ...]:
    """Nodes of a chain, up to the last that was accepted."""
    return tuple(range(accepted))


@dataclass(frozen=True, slots=True)
class Landed:
    """What a round brought, by seat, and what it cost the device."""

    accepted: list[int]
    levels: list[int]  # drafted
    is_bonus: list[bool]  # nothing drafted was rejected
    paths: list[tuple[int, ...]]  # nodes accepted, in order
    tokens: list[list[int]]  # -1 past the last
    draft_seconds: float
    verify_seconds: float
    sample_seconds: float

    def times(self, now: float) -> StepTimes:
        """Of a round that came home `now`: when its parts must have begun."""
        drafted = now - self.verify_seconds - self.sample_seconds
        return StepTimes(drafted - self.draft_seconds, drafted, now)


class Launch:
    """Host memory and events of a round under way."""

    def __init__(self, batch: int, max_levels: int, ints: int, device: torch.device) -> None:
        self.control = staging(ints, dtype=torch.int32, device=device)
        self.report = staging(3, batch, dtype=torch.int32, device=device)
        self.tokens = staging(batch * (max_levels + 1), dtype=torch.int64, device=device)
        self.rows = staging(batch * (max_levels + 1), dtype=torch.int64, device=device)
        self.begin, self.drafted, self.verified, self.end = (Stamp(device) for _ in range(4))

    def tokens_at(self, levels: int) -> Tensor:
        """[B, levels + 1]"""
        return self.tokens[: self.report.shape[1] * (levels + 1)].view(-1, levels + 1)

    def rows_at(self, levels: int) -> Tensor:
        """[B, levels + 1]: rows of the pass that the committed path went through."""
        return self.rows[: self.report.shape[1] * (levels + 1)].view(-1, levels + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A round under way."""

    shape: DraftShape
    is_tree: bool
    limits: tuple[int | None, ...]
    """Nodes granted to each seat; None: it is empty."""
    launch: Launch
    is_timed: bool
    """False for the first of its shape: graphs were recorded on the way."""

    def land(self) -> Landed:
        """Wait for it."""
        launch = self.launch
        launch.end.wait()
        accepted, bonuses, levels = launch.report.tolist()
        if not self.is_tree:
            levels = [limit or 0 for limit in self.limits]
            is_bonus = [count == level for count, level in zip(accepted, levels, strict=False)]
            paths = [chain_path(count) for count in accepted]
        else:
            is_bonus = [bonus == 1 for bonus in bonuses]
            first = range(
                0, len(accepted) * (1 + self.shape.nodes), 1 + self.shape.nodes
            )  # row of each seat's last token
            rows = launch.rows_at(self.shape.levels).tolist()
            paths = [
                tuple(row - root - 1 for row in way[1 : 1 + count])
                for way, count, root in zip(rows, accepted, first, strict=True)
            ]
        return Landed(
            accepted,
            levels,
            is_bonus,
            paths,
            launch.tokens_at(self.shape.levels).tolist(),
            launch.drafted.seconds_since(launch.begin),
            launch.verified.seconds_since(launch.drafted),
            launch.end.seconds_since(launch.verified),
        )
