"""The weights a worker holds, for others to take."""

import json
from functools import cached_property

import tokenizers
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.models.loading.load import LoadedModel
from paceline.models.loading.weight_manifest import (
    Manifest,
    PartForm,
    config_to_json,
    part_sum,
    piece_form,
    piece_tensors,
)
from paceline.models.loading.weight_parts import Parts, Piece, part_of
from paceline.models.tokenizer.tokenizer import Tokenizer


class WeightStock:
    """A model that is complete. Read-only, and so is what it gives out."""

    def __init__(self, loaded: LoadedModel, form: str, fingerprint: str, manifest: Manifest | None = None) -> None:
        """`manifest`: the one it was itself loaded by, whose checksums held."""
        assert loaded.model.is_complete
        self._loaded, self._form, self._fingerprint = loaded, form, fingerprint
        self._given = manifest
        self._parts = Parts.of(loaded.config)

    def tensors(self, part: int) -> list[Tensor]:
        """Of a part, in the order of the manifest, wherever the model has them."""
        return [tensor for piece in self._pieces(part).values() for tensor in piece_tensors(piece)]

    @cached_property
    def manifest(self) -> Manifest:
        """The first time this reads all weights: about a second for 1.5 GB."""
        if self._given is not None:
            return self._given
        loaded = self._loaded
        parts = tuple(self._part(part) for part in range(self._parts.count))
        return Manifest(loaded.name, self._form, self._fingerprint, config_to_json(loaded.config), parts)

    def _part(self, part: int) -> PartForm:
        pieces = self._pieces(part)
        forms = tuple(piece_form(name, piece) for name, piece in pieces.items())
        return PartForm(forms, part_sum(self.tensors(part)))

    def _pieces(self, part: int) -> dict[str, Piece]:
        return self._tokenizer if part == self._parts.tokenizer else part_of(self._loaded.model, part)

    @cached_property
    def _tokenizer(self) -> dict[str, Piece]:
        return {"tokenizer": tokenizer_to_tensor(self._loaded.tokenizer)}


def tokenizer_to_tensor(tokenizer: Tokenizer) -> Tensor:
    """[n] uint8: JSON, the same for the same tokenizer."""
    values = {
        "tokenizer": tokenizer.to_json(),
        "bos_id": tokenizer.bos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "special_tokens": tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }
    return torch.frombuffer(bytearray(json.dumps(values, sort_keys=True).encode()), dtype=torch.uint8)


def tokenizer_from_tensor(data: Tensor) -> Tokenizer:
    try:
        values = json.loads(bytes(data.cpu().numpy()))
        backend = tokenizers.Tokenizer.from_str(values.pop("tokenizer"))
        return Tokenizer(backend, **values)
    except Exception as error:  # whatever the library makes of a text that another version of it wrote
        raise UnsupportedModel(f"a tokenizer that cannot be read: {error!r}") from None
