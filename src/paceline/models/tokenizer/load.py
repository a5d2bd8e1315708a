"""Reads the tokenizer of a model, without its weights and without torch."""

from pathlib import Path

from paceline.models.architectures.inflation import PREFIX, Inflation
from paceline.models.loading.gguf_reader import GGUFReader
from paceline.models.loading.hub import find_checkpoint
from paceline.models.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from paceline.models.tokenizer.tokenizer import Tokenizer, tokenizer_from_folder


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer that `load_model` would return with this model."""
    if str(name_or_path).startswith(PREFIX):
        return load_tokenizer(Inflation.parse(str(name_or_path)).base)
    path = find_checkpoint(name_or_path)
    if path.is_file():
        return tokenizer_from_gguf(GGUFReader(path).metadata)
    return tokenizer_from_folder(path)
