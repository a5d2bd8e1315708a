"""Rank 0's side of device work that all ranks do: passes, and moves of accepted paths."""

from functools import partial

from torch import Tensor

from paceline.kernels.layout import AttentionLayout, PassSize
from paceline.models.cuda_graph import graph_in_capture
from paceline.models.gpu.ranks.device_inputs import MoveInputs, PassInputs, move_values, pass_values
from paceline.models.parallel.commands import DeviceMove, DevicePass
from paceline.models.parallel.rank_cache import RankCache


class Leader:
    """Lets the other ranks follow the passes over one cache with the first `num_layers` layers.

    The host of rank 0 tells the other ranks what to launch. The inputs follow from device to device, inside the work: the sum
    over all ranks of a vector that is zero on all ranks but rank 0. If the work is captured, the other ranks capture it too,
    and every replay is announced.
    """

    def __init__(self, cache: RankCache, num_layers: int) -> None:
        self._cache, self._num_layers = cache, num_layers

    def begin_pass(self, size: PassSize, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> None:
        """Let the other ranks begin this pass."""
        width, is_tree = layout.block_tables.shape[1], layout.ancestors is not None
        work = DevicePass(size, width, is_tree, layout.long_prompts, self._num_layers, self._cache.number)
        self._lead(work, pass_values(PassInputs(tokens, positions, layout)))

    def begin_move(self, inputs: MoveInputs, rows_each: int) -> None:
        """Let the other ranks move these paths. `rows_each` is the number of rows of a tree."""
        trees, path_rows = inputs.rows.shape
        work = DeviceMove(trees, rows_each, path_rows, inputs.block_tables.shape[1], self._cache.number)
        self._lead(work, move_values(inputs))

    def _lead(self, work: DevicePass | DeviceMove, values: Tensor) -> None:
        graph, ranks = graph_in_capture(), self._cache.ranks
        if graph is None:
            self._cache.follow("run", work)
        else:
            self._cache.follow("capture", work)
            graph.before_replay.append(partial(self._cache.follow, "replay", work))
        with ranks.report_lost_ranks():
            ranks.group.sum(values)
