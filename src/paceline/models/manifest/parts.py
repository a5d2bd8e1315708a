"""The parts in which a model's weights are loaded and transferred, in the order in which a pass needs them.

0        the tokenizer
1        `tables`: embedding, head, and all norms and biases
2, 3, …  the matrices of layer 0, 1, …
"""

import json
from dataclasses import dataclass

import tokenizers
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations
from paceline.model_files.tokenizer import Tokenizer
from paceline.models.decoder import DecoderModel, Loader
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights import Checkpoint, checkpoint_weights

Piece = LinearWeight | Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Numbers and names of the parts of a model."""

    num_layers: int
    tokenizer: int = 0
    tables: int = 1

    @staticmethod
    def of(config: DecoderSpec) -> "Parts":
        return Parts(config.num_layers)

    @property
    def count(self) -> int:
        return 2 + self.num_layers

    def layer(self, number: int) -> int:
        return 2 + number

    def layer_number(self, part: int) -> int:
        return part - 2

    def is_layer(self, part: int) -> bool:
        return 2 <= part < 2 + self.num_layers

    def name(self, part: int) -> str:
        return f"layer {part - 2}" if self.is_layer(part) else ("tokenizer", "tables")[part]


def part_of(model: DecoderModel, part: int) -> dict[str, Piece]:
    """Weights of a part other than the tokenizer, by name."""
    parts = Parts.of(model.config)
    if parts.is_layer(part):
        layer = model.layers[part - parts.layer(0)]
        return {name: getattr(layer, name) for name in model.config.matrix_names(layer.number)}
    tables: dict[str, Piece] = {"embedding": model.embedding}
    if not model.config.tie_embeddings:
        tables["head"] = model.head
    return {**tables, "final_norm": model.final_norm, **_vectors(model)}


class CheckpointParts:
    """Reads the same parts from a checkpoint, prepared as `load_model` prepares them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations = "int8",
    ) -> None:
        self._config, self._parts = checkpoint.config, Parts.of(checkpoint.config)
        weights = checkpoint_weights(checkpoint, device, quantization, activations)
        self._load = Loader(self._config, weights, device, dtype)

    def read(self, part: int) -> dict[str, Piece]:
        if self._parts.is_layer(part):
            return dict(self._load.layer_matrices(part - self._parts.layer(0)))
        pieces: dict[str, Piece] = {"embedding": self._load.matrix("model.embed_tokens")}
        if not self._config.tie_embeddings:
            pieces["head"] = self._load.matrix("lm_head")
        pieces["final_norm"] = self._load.norm("model.norm.weight")
        for i in range(self._config.num_layers):
            vectors = self._load.layer_vectors(i)
            pieces.update({f"layers.{i}.{name}": vector for name, vector in vectors.items()})
        return pieces


def _vectors(model: DecoderModel) -> dict[str, Piece]:
    return {
        f"layers.{number}.{piece.attribute}": getattr(layer, piece.attribute)
        for number, layer in enumerate(model.layers)
        for piece in model.config.pieces(number)
        if not piece.is_matrix
    }


def tokenizer_to_tensor(tokenizer: Tokenizer) -> Tensor:
    """[n] uint8: JSON, equal for equal tokenizers."""
    values = {
        "tokenizer": tokenizer.to_json(),
        "bos_id": tokenizer.bos_id,
        "eos_ids": sorted(tokenizer.eos_ids),
        "special_tokens": tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }
    return torch.frombuffer(bytearray(json.dumps(values, sort_keys=True).encode()), dtype=torch.uint8)


def tokenizer_from_tensor(data: Tensor) -> Tokenizer:
    """The tokenizer in `tokenizer_to_tensor` format. Raises `UnsupportedModel` if it cannot be read."""
    try:
        values = json.loads(bytes(data.cpu().numpy()))
        backend = tokenizers.Tokenizer.from_str(values.pop("tokenizer"))
        return Tokenizer(backend, **values)
    except Exception as error:  # the library may reject a text that another version wrote
        raise UnsupportedModel(f"the tokenizer cannot be read: {error!r}") from None
