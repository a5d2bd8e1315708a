"""How much memory a model's weights will take, before any is read: a system that runs out of it kills without a word."""

from pathlib import Path

import torch

from paceline.core.errors import OutOfMemory
from paceline.core.machine import available_memory
from paceline.kernels.cpu import native
from paceline.models.architectures.inflation import PREFIX
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.hub import find_model
from paceline.models.loading.prequantized import SCALES
from paceline.models.loading.safetensors_folder import FolderWeights

GGUF_GROWTH = 4 / 3
"""A quantised file's half-precision scales are kept in single precision: at the most this much more."""


def weight_bytes(
    name: str | Path, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize: bool
) -> int:
    """About what the weights will take: as they lie in the file on the CPU, or if they are quantised there; elsewhere in
    `dtype`, or the layers in 8 bits."""
    config, is_made = checkpoint.config, str(name).startswith(PREFIX)
    is_native = device.type == "cpu" and dtype == torch.float32 and native.available()
    has_scales = any(weight.endswith(SCALES) for weight in checkpoint.weights.names())
    if is_made or quantize or not (is_native or has_scales):
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        layers = config.num_parameters - tables
        return tables * dtype.itemsize + layers * (1 if quantize else dtype.itemsize)
    if isinstance(checkpoint.weights, FolderWeights):
        return checkpoint.weights.file_bytes
    path = find_model(name)
    file = path if path.is_file() else next(path.glob("*.gguf"))
    return int(GGUF_GROWTH * file.stat().st_size)


def check_room(
    name: str | Path, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize: bool, ranks: int
) -> None:
    """Raise `OutOfMemory` if the weights alone are more than the device has free for each of `ranks`."""
    free = available_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
    needed = weight_bytes(name, checkpoint, device, dtype, quantize)
    if device.type != "cpu":  # there the ranks share it
        needed //= ranks
    if free is not None and needed > free:
        smaller = "a smaller model" if quantize else "a smaller model, or quantization int8 or fp8"
        raise OutOfMemory(
            f"{checkpoint.name} does not fit: its weights take about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            f"{device.type} memory are free. Use {smaller}, or a device with more memory."
        )
