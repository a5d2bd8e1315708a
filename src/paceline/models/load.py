"""The way in: a name or a path becomes a model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import UnsupportedModel
from paceline.kernels import native
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.gguf_file import open_gguf
from paceline.models.hub import find_model
from paceline.models.llama import DecoderModel
from paceline.models.safetensors_folder import open_folder
from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    name: str
    config: ModelConfig
    model: DecoderModel
    tokenizer: Tokenizer


def open_checkpoint(name_or_path: str | Path) -> Checkpoint:
    """Config and names of a checkpoint, without reading its weights or vocabulary."""
    path = find_model(name_or_path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path} is not a .gguf file; for safetensors give the folder")
        return open_gguf(path)
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        if len(files) > 1:
            raise UnsupportedModel(f"{path} holds {len(files)} GGUF files: name one of them, such as {files[0]}")
        return open_gguf(files[0])
    return open_folder(path)


def load_model(
    name_or_path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    checkpoint = open_checkpoint(name_or_path)
    # Unpacking is thousands of small operations: on a busy machine threads wait milliseconds for each other.
    with native.quiet_torch():
        model = DecoderModel(checkpoint.config, checkpoint.weights, torch.device(device), dtype)
    return LoadedModel(checkpoint.name, checkpoint.config, model, checkpoint.read_tokenizer())
