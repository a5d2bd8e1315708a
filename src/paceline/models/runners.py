"""Runners for a model's device and for its first layers."""

import copy
from dataclasses import replace

import torch

from paceline.core.errors import InvalidConfig
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


def early_exit(runner: ModelRunner, num_layers: int) -> ModelRunner:
    """A runner of the first `num_layers` layers of the runner's model, followed by its final norm and head.

    It shares weights and cache with `runner` and stores to the same slots. The whole model has to compute those slots again
    before another pass reads them.
    """
    whole = runner.model
    if not 1 <= num_layers <= whole.config.num_layers:
        raise InvalidConfig(
            f"an early exit after {num_layers} layers is not possible: the model has {whole.config.num_layers} layers"
        )
    model = copy.copy(whole)
    model.config = replace(whole.config, num_layers=num_layers)
    model.layers = whole.layers[:num_layers]
    model.norms_after = [*whole.norms_after[: num_layers - 1], whole.norms_after[-1]]
    return runner.share_cache(model)
