"""Device memory of steps of one shape."""

import torch
from torch import Tensor

from paceline.engine.executors.graph.drafters.drafter import DraftShape, DraftTensors
from paceline.engine.executors.graph.rows import ChainRows, TreeRows
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.models.architectures.decoder import ForwardOutput
from paceline.models.gpu.runner import GpuRunner


class RoundBuffers:
    """What a step of one shape writes: the accepted path, and the rows and logits of its pass."""

    def __init__(
        self, target: GpuRunner, tables: Tensor, size: int, shape: DraftShape, drafts: DraftTensors | None
    ) -> None:
        device, rows = target.device, 1 + shape.nodes
        self.report = torch.zeros(3, size, dtype=torch.int32, device=device)  # accepted, is bonus, levels
        self.path = AcceptedPath(
            self.report[0],
            self.report[1],
            torch.full((size, 1 + shape.levels), -1, dtype=torch.int64, device=device),
            torch.arange(0, size * rows, rows, device=device).unsqueeze(1).repeat(1, 1 + shape.levels),
        )
        self.chain: ChainRows | None = None
        self.tree: TreeRows | None = None
        if drafts is None or drafts.parents is None:
            self.chain = ChainRows(target, tables, size, rows, target.workspace.logits(size * rows))
        else:
            self.tree = TreeRows(target, tables, self.report[2], shape.nodes, shape.levels)
        self.drafts = drafts
        self.output: ForwardOutput | None = None
