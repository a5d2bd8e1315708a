"""Runners for a model's device."""

import torch

from paceline.kernels.gpu_model import uses_gpu_kernels
from paceline.models.architectures.llama import DecoderModel
from paceline.models.parallel.runner import ParallelRunner
from paceline.models.runner import ModelRunner


def make_runner(
    model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None = None, weights_id: str = ""
) -> ModelRunner:
    """A `GpuRunner` for a model on a GPU, otherwise a `ModelRunner`."""
    if uses_gpu_kernels(model.device):
        from paceline.models.gpu.runner import GpuRunner

        return GpuRunner(model, num_blocks, kv_dtype, weights_id=weights_id)
    return ModelRunner(model, num_blocks, kv_dtype, weights_id=weights_id)


def make_second_runner(
    first: ModelRunner, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None = None
) -> ModelRunner:
    """A runner with a cache of its own beside `first`, for the same model, its first layers or a draft. Close it before
    `first`."""
    if isinstance(first, ParallelRunner) and model.layers[0].reduce is not None:
        return first.with_cache(model, num_blocks, kv_dtype)
    return make_runner(model, num_blocks, kv_dtype)
