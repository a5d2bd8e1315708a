"""Loads a model and its tokenizer by name or path, if they fit in memory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import OutOfMemory, UnsupportedModel
from paceline.core.machine import available_memory
from paceline.kernels.cpu import native
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations
from paceline.kernels.rope import rotary_table_bytes
from paceline.model_files import quick_checksum
from paceline.model_files.hub import PREFIX, Inflation, find_checkpoint
from paceline.model_files.tokenizer import Tokenizer
from paceline.models.decoder import DecoderModel, Loader
from paceline.models.draft_files import recognize_draft
from paceline.models.families.prequantized import SCALES
from paceline.models.families.spec import DecoderSpec
from paceline.models.loading.inflated import inflate
from paceline.models.memory import ReadAhead
from paceline.models.shards import Shard, ShardedWeights, check_split, shard_config
from paceline.models.weights import Checkpoint, Weights, checkpoint_weights, open_folder, open_gguf

_GPU_GROWTH = 1.25
"""Bytes on a GPU per byte of a file with 4-bit codes, at most: groups of 32 have more bits for scales and zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    name: str
    config: DecoderSpec
    model: DecoderModel
    tokenizer: Tokenizer
    checksum: str = ""
    """`quick_checksum` of its files. Empty if it is not known."""


def open_checkpoint(
    name_or_path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """Configuration and weight names of a checkpoint; weights and vocabulary are not read.

    `device` and `dtype` apply to the weights of an inflated model, which are generated. Other weights are read as stored.
    """
    if str(name_or_path).startswith(PREFIX):
        inflation = Inflation.parse(str(name_or_path))
        return inflate(open_checkpoint(inflation.base), inflation, device, dtype)
    path = find_checkpoint(name_or_path)
    if path.is_file():
        return open_gguf(path)
    draft = recognize_draft(path)
    if draft is not None:
        raise UnsupportedModel(f"{path} holds a draft ({draft.kind}), not a whole model: pass it as `draft`")
    return open_folder(path)


def load_model(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
    activations: Activations = "int8",
    shard: Shard | None = None,
) -> LoadedModel:
    """The model and its tokenizer. `quantization` rounds the matrices of the layers to 8 bits; products with quantised matrices
    on a CPU round `activations`. With a `shard`, model and config are those of one rank."""
    checkpoint = open_checkpoint(name_or_path, device, dtype)
    is_quantized = quantization is not None
    check_memory(
        name_or_path, checkpoint, torch.device(device), dtype, is_quantized, 1 if shard is None else shard.size
    )
    model = build_model(checkpoint, torch.device(device), dtype, quantization, activations, shard)
    checksum = quick_checksum(name_or_path)
    return LoadedModel(checkpoint.name, model.config, model, checkpoint.read_tokenizer(), checksum)


def build_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    activations: Activations = "int8",
    shard: Shard | None = None,
) -> DecoderModel:
    config, weights = checkpoint.config, checkpoint_weights(checkpoint, device, quantization, activations)
    # Unpacking is thousands of small operations; on a busy machine torch threads would wait for each other.
    with native.single_threaded_torch(), ReadAhead(checkpoint.files if device.type == "cuda" else ()):
        if shard is None:
            model = DecoderModel(config, weights, device, dtype)
        else:
            model = _build_shard(config, weights, device, dtype, shard)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # returns temporary memory, which the KV cache needs next
    return model


def _build_shard(
    config: DecoderSpec, weights: Weights, device: torch.device, dtype: torch.dtype, shard: Shard
) -> DecoderModel:
    check_split(config, shard.size)
    own, tables = ShardedWeights(weights, config, shard), None
    if shard.rank > 0:  # only rank 0 computes logits: the other ranks need no head
        embedding = Loader(config, own, device, dtype).matrix("model.embed_tokens")
        tables = (embedding, embedding)
    return DecoderModel(shard_config(config, shard.size), own, device, dtype, tables, shard.reduce)


def weight_bytes(
    name: str | Path, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize: bool
) -> int:
    """Estimated bytes of the loaded weights. The native CPU kernels and quantised checkpoints keep the size of the file. Other
    weights take `dtype`, or 8 bits in the layers with `quantize`."""
    config, is_inflated = checkpoint.config, str(name).startswith(PREFIX)
    file_bytes = sum(file.stat().st_size for file in checkpoint.files)
    if device.type != "cpu" and checkpoint.growth > 1.0:
        return int(_GPU_GROWTH * file_bytes)
    is_native = device.type == "cpu" and dtype == torch.float32 and native.available()
    has_scales = any(weight.endswith(SCALES) for weight in checkpoint.weights.names())
    if is_inflated or quantize or not (is_native or has_scales):
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        layers = config.num_parameters - tables
        return tables * dtype.itemsize + layers * (1 if quantize else dtype.itemsize)
    return int(checkpoint.growth * file_bytes)


def check_memory(
    name: str | Path, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize: bool, ranks: int
) -> None:
    """Raise `OutOfMemory` if the weights exceed the free memory of the device of each of `ranks`."""
    if device.type == "meta":
        return
    free = available_memory() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
    needed = weight_bytes(name, checkpoint, device, dtype, quantize)
    config = checkpoint.config
    needed += sum(rotary_table_bytes(rotary.size, config.max_position) for rotary in config.rotary)
    if device.type != "cpu":  # the ranks of a CPU share its memory
        needed //= ranks
    if free is not None and needed > free:
        smaller = "a smaller model" if quantize else "a smaller model, or quantization int8 or fp8"
        raise OutOfMemory(
            f"{checkpoint.name} does not fit: its weights and rotary table take about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB of {device.type} memory are free. Use {smaller}, or a device with more memory."
        )
