"""Runners for a model's device."""

import torch

from paceline.kernels.gpu_model import uses_gpu_kernels
from paceline.models.architectures.llama import DecoderModel
from paceline.models.runner import ModelRunner


def make_runner(
    model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None = None, weights_id: str = ""
) -> ModelRunner:
    """A `GpuRunner` for a model on a GPU, otherwise a `ModelRunner`."""
    if uses_gpu_kernels(model.device):
        from paceline.models.gpu.runner import GpuRunner

        return GpuRunner(model, num_blocks, kv_dtype, weights_id=weights_id)
    return ModelRunner(model, num_blocks, kv_dtype, weights_id=weights_id)
