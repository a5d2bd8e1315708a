"""Memory of passes that follow one another. A graph that kept its own would keep it for good, and there are many graphs."""

import torch
from torch import Tensor

from paceline.kernels.gpu.attention_plan import AttentionScratch, power_of_two
from paceline.models.architectures.llama import DecoderModel
from paceline.models.cuda_graph import MAX_GRAPH_ROWS


class Rooms:
    """For all passes of one model, or of one and its early exits. What outgrew its room gets another: ask for the largest
    first."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._logits: Tensor | None = None
        self._states: Tensor | None = None
        self._attended: Tensor | None = None
        self.attention = AttentionScratch(model.device)

    def logits(self, rows: int) -> Tensor:
        """[rows, V] float32"""
        if self._logits is None or len(self._logits) < rows:
            shape = power_of_two(max(rows, MAX_GRAPH_ROWS)), self._model.head.shape[0]
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._model.device)
        return self._logits[:rows]

    def states(self, count: int, rows: int) -> Tensor:
        """[count, rows, D]"""
        width, held = self._model.config.hidden_size, self._states
        if held is None or len(held) < count * rows:
            held = self._states = torch.empty(count * rows, width, dtype=self._model.dtype, device=self._model.device)
        return held[: count * rows].view(count, rows, width)

    def attended(self, rows: int) -> Tensor:
        """[rows, H * hd], zeros at first: what nobody writes is finite."""
        config = self._model.config
        if self._attended is None or len(self._attended) < rows:
            shape = rows, config.num_heads * config.head_dim
            self._attended = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        return self._attended[:rows]
