"""The way in: a name or a path becomes a model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.quantized import Quantization
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.inflate import inflate
from paceline.models.architectures.inflation import PREFIX, Inflation
from paceline.models.architectures.llama import DecoderModel, Loader
from paceline.models.drafts.folder import open_draft_folder
from paceline.models.loading.checkpoint import Checkpoint, Weights
from paceline.models.loading.gguf_file import open_gguf
from paceline.models.loading.hub import find_checkpoint
from paceline.models.loading.quantize import QuantizedWeights
from paceline.models.loading.safetensors_folder import open_folder
from paceline.models.loading.weight_size import check_room
from paceline.models.parallel.shards import Shard, ShardedWeights, check_split, shard_config
from paceline.models.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    name: str
    config: ModelConfig
    model: DecoderModel
    tokenizer: Tokenizer


def open_checkpoint(
    name_or_path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """Config and names of a checkpoint, without reading its weights or vocabulary.

    `device` and `dtype` are where and what the weights of an inflated model are made; others come as they are stored.
    """
    if str(name_or_path).startswith(PREFIX):
        what = Inflation.parse(str(name_or_path))
        return inflate(open_checkpoint(what.base), what, device, dtype)
    path = find_checkpoint(name_or_path)
    if path.is_file():
        return open_gguf(path)
    draft = open_draft_folder(path)
    if draft is not None:
        raise UnsupportedModel(f"{path} holds a draft ({draft.kind}), not a whole model: give it as `draft`")
    return open_folder(path)


def load_model(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
    shard: Shard | None = None,
) -> LoadedModel:
    """`quantization` rounds the matrices of the layers to 8 bits as they are loaded. With a `shard`, model and config are
    those of one rank's share."""
    checkpoint = open_checkpoint(name_or_path, device, dtype)
    is_quantized = quantization is not None
    check_room(name_or_path, checkpoint, torch.device(device), dtype, is_quantized, 1 if shard is None else shard.size)
    model = build_model(checkpoint, torch.device(device), dtype, quantization, shard)
    return LoadedModel(checkpoint.name, model.config, model, checkpoint.read_tokenizer())


def build_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    shard: Shard | None = None,
) -> DecoderModel:
    config, weights = checkpoint.config, stored_weights(checkpoint, device, quantization)
    # Unpacking is thousands of small operations: on a busy machine threads wait milliseconds for each other.
    with native.quiet_torch():
        if shard is None:
            model = DecoderModel(config, weights, device, dtype)
        else:
            model = _share(config, weights, device, dtype, shard)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what it took to make them: the caches want it next
    return model


def stored_weights(checkpoint: Checkpoint, device: torch.device, quantization: Quantization | None) -> Weights:
    if quantization is None:
        return checkpoint.weights
    # Before it is cut: every number of ranks computes with the same values
    return QuantizedWeights(checkpoint.weights, quantization, device)


def _share(
    config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype, shard: Shard
) -> DecoderModel:
    check_split(config, shard.size)
    own, tables = ShardedWeights(weights, config, shard), None
    if shard.rank > 0:  # these compute no logits: the embedding stands in for the head
        embedding = Loader(own, device, dtype).matrix("model.embed_tokens")
        tables = (embedding, embedding)
    return DecoderModel(shard_config(config, shard.size), own, device, dtype, tables, shard.reduce)
