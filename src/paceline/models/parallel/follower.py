"""The work of the other ranks on their GPUs: each computes the passes of rank 0. See gpu.py."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.gpu.attention.plan import AttentionPlan
from paceline.kernels.gpu.speculation.tree_rows import CacheAddresses, move_paths
from paceline.models.decoder import DecoderModel, gpu_forward, plan_pass
from paceline.models.device import Graph
from paceline.models.parallel.commands import DeviceMove, DevicePass, Follow
from paceline.models.parallel.gpu import count_values, move_inputs, pass_inputs
from paceline.models.parallel.group import RankGroup
from paceline.models.runner import Cache, first_layers
from paceline.models.runner.gpu import Workspace


class Follower:
    """Computes passes with this rank's share of the model."""

    def __init__(self, model: DecoderModel, group: RankGroup) -> None:
        self._model, self._group, self._workspace = model, group, Workspace(model)
        self._models: dict[int, DecoderModel] = {model.config.num_layers: model}
        self._graphs: dict[DevicePass | DeviceMove, Graph[None]] = {}

    def follow(self, command: Follow, cache: Cache) -> None:
        work, pool = command.work, self._workspace.graph_pool
        if command.launch == "replay":
            self._graphs[work].replay()
        elif command.launch == "capture":
            if work not in self._graphs:
                self._graphs[work] = Graph(self._work(work, cache), self._model.device, pool, is_warm=True)
        else:
            with pool.on_stream():  # captures need the memory that kernels get at their first launch in a stream
                self._work(work, cache)()

    def release(self, cache: int) -> None:
        """Forget the graphs of a cache."""
        self._graphs = {work: graph for work, graph in self._graphs.items() if work.cache != cache}

    def _work(self, work: DevicePass | DeviceMove, cache: Cache) -> Callable[[], None]:
        """Memory that captured work must not allocate is allocated here."""
        if isinstance(work, DeviceMove):
            return partial(self._move, work, CacheAddresses(cache))
        if work.num_layers not in self._models:
            self._models[work.num_layers] = first_layers(self._model, work.num_layers)
        model, workspace = self._models[work.num_layers], self._workspace
        plan = plan_pass(model, work.size, workspace.attention_scratch)
        return partial(
            self._pass, work, model, cache[: work.num_layers], plan, workspace.attention_output(work.size.rows)
        )

    def _pass(
        self, work: DevicePass, model: DecoderModel, cache: Cache, plan: AttentionPlan, attention_out: Tensor
    ) -> None:
        """The layers of a pass; rank 0 computes the logits."""
        inputs = pass_inputs(self._received(work), work)
        where = inputs.tokens, inputs.positions, inputs.layout
        gpu_forward(model, *where, cache, logit_rows=None, plan=plan, attention_out=attention_out)

    def _move(self, work: DeviceMove, addresses: CacheAddresses) -> None:
        inputs = move_inputs(self._received(work), work)
        move_paths(addresses, inputs.contexts, inputs.block_tables, inputs.rows, inputs.counts, work.rows_each)

    def _received(self, work: DevicePass | DeviceMove) -> Tensor:
        """The inputs, as rank 0 sends them."""
        values = torch.zeros(count_values(work), dtype=torch.int64, device=self._model.device)
        return self._group.sum(values)
