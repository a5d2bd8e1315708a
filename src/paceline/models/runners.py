"""Runners for a model's device."""

import torch

from paceline.kernels.formats.layout import uses_gpu_kernels
from paceline.models.decoder import DecoderModel
from paceline.models.parallel import ParallelRunner, Ranks
from paceline.models.runner import ModelRunner


def make_runner(
    model: DecoderModel,
    num_blocks: int,
    kv_dtype: torch.dtype | None = None,
    weights_id: str = "",
    ranks: Ranks | None = None,
) -> ModelRunner:
    """The runner for a model's device. `ranks` are the ranks of a model that is split."""
    if not uses_gpu_kernels(model.device):
        if ranks is None:
            return ModelRunner(model, num_blocks, kv_dtype, weights_id=weights_id)
        return ParallelRunner(model, num_blocks, ranks, kv_dtype, weights_id)
    if ranks is None:
        from paceline.models.runner.gpu import GpuRunner

        return GpuRunner(model, num_blocks, kv_dtype, weights_id=weights_id)
    from paceline.models.parallel import ParallelGpuRunner

    return ParallelGpuRunner(model, num_blocks, ranks, kv_dtype, weights_id)


def make_second_runner(
    first: ModelRunner, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None = None
) -> ModelRunner:
    """A second runner in addition to `first`, with a cache of its own, for the same model, its first layers or a draft. Close
    it before `first`."""
    if model.layers[0].reduce is not None:
        return first.with_cache(model, num_blocks, kv_dtype)
    return make_runner(model, num_blocks, kv_dtype)
