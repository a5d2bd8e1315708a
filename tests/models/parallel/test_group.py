"""A group of one rank."""

import pytest
import torch
import torch.distributed as dist

from paceline.models.parallel import group as module
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.group import RankGroup


class FakeGraph:
    """Notes whether the process was in a group when the graph was released."""

    was_in_group: bool | None = None

    def release(self) -> None:
        self.was_in_group = dist.is_initialized()


def test_graphs_with_sums_end_before_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup(RankSpec("model", 1, torch.device("cpu"), torch.float32), 0)
    group.join(dist.HashStore())
    graph = FakeGraph()
    try:
        monkeypatch.setattr(module, "graph_in_capture", lambda: graph)
        assert group.sum(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        group.leave()
    assert graph.was_in_group
    assert not dist.is_initialized()
