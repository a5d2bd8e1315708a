"""The description of a decoder: its sizes, and what each layer computes. Weights, their split over ranks and the forward pass
follow from it.

A family is a function that returns a `DecoderSpec` (`registry.py`). All layers of a model have the same attention and norms;
they may differ in their window and their rotary embedding, and the first ones may be dense in a model with experts.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.core.errors import UnsupportedModel
from paceline.models.families.layers import FeedForward, Heads, LayerSpec, Norms, Rotary, RoutedExperts
from paceline.models.families.tensors import PieceSpec, TensorSpec, layer_pieces, layer_tensors

EXPERT_MULTIPLE = 32
"""The width of a model with experts, and that of an expert, are multiples of it: outputs of a tile of the CPU kernels."""
_LAYERS = "model.layers."
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything that the forward pass needs in addition to the weights."""

    architecture: str
    """Name of the family."""
    vocab_size: int
    """Rows of the embedding; a padded vocabulary has more than the tokenizer."""
    hidden_size: int
    rms_eps: float
    max_position: int
    rotary: tuple[Rotary, ...]
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    """Factor of the embedding before layer 0."""
    residual_scale: float = 1.0
    """Factor of what attention and the feed-forward layer add to the hidden state."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """If not None, a logit x becomes cap * tanh(x / cap)."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds = {layer.ffn for layer in self.layers}
        has_kinds = len(kinds) > 2 or len({type(ffn) for ffn in kinds}) < len(kinds)
        if len({(replace(layer.attention, own=None), layer.norms) for layer in self.layers}) > 1 or has_kinds:
            raise UnsupportedModel(
                "layers that differ in more than their window, rotary embedding and having experts are not supported"
            )
        for ffn in {layer.ffn for layer in self.layers}:
            if isinstance(ffn, RoutedExperts) and (self.hidden_size % EXPERT_MULTIPLE or ffn.width % EXPERT_MULTIPLE):
                raise UnsupportedModel(
                    f"experts of {self.hidden_size} inputs and a width of {ffn.width} are not supported: "
                    f"both must be multiples of {EXPERT_MULTIPLE}"
                )

    @property
    def has_plain_logits(self) -> bool:
        """Whether the logits are the unchanged output of the head."""
        return self.logit_cap is None and self.logit_scale == 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> Heads:
        """Attention of every layer."""
        return self.layers[0].attention

    @property
    def ffn(self) -> FeedForward:
        """The feed-forward layer of the last layer: in a model with experts, the first layers may be dense."""
        return self.layers[-1].ffn

    @property
    def experts(self) -> RoutedExperts | None:
        """The experts of the layers that have them. None if all feed-forward layers are dense."""
        return self.ffn if isinstance(self.ffn, RoutedExperts) else None

    @property
    def norms(self) -> Norms:
        return self.layers[0].norms

    @property
    def num_heads(self) -> int:
        return self.heads.num

    @property
    def num_kv_heads(self) -> int:
        return self.heads.num_kv

    @property
    def head_dim(self) -> int:
        return self.heads.head_dim

    @property
    def ffn_size(self) -> int:
        """Width of a feed-forward layer, or of one expert."""
        return self.ffn.width

    @property
    def sliding_window(self) -> int | None:
        """The shortest window of a layer. None if all layers attend to all tokens."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window in a model that has windows."""
        if self.sliding_window is None:
            return ()
        return tuple(number for number, layer in enumerate(self.layers) if layer.window is None)

    def attended(self, context: int) -> int:
        """Tokens of a context that a token attends to, averaged over the layers."""
        if self.sliding_window is None:
            return context
        windows = Counter(layer.window for layer in self.layers)
        total = sum(count * (context if window is None else min(context, window)) for window, count in windows.items())
        return total // self.num_layers

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of one token in the KV cache, over all layers."""
        return sum(2 * layer.attention.kv_size for layer in self.layers) * bytes_per_value

    def first_layers(self, count: int) -> "DecoderSpec":
        return replace(self, layers=self.layers[:count])

    def pieces(self, number: int) -> tuple[PieceSpec, ...]:
        """The pieces of layer `number` in the order in which they are transferred."""
        return layer_pieces(self.hidden_size, self.layers[number])

    def matrix_names(self, number: int) -> tuple[str, ...]:
        """Attributes of layer `number` that hold its matrices."""
        return tuple(piece.attribute for piece in self.pieces(number) if piece.is_matrix)

    def tensor(self, name: str) -> TensorSpec | None:
        """The description of a layer's weight by its whole name. None if no layer has a weight with this name."""
        prefix, _, rest = name.partition(_LAYERS)
        number, _, inner = rest.partition(".")
        if prefix or not number.isdigit() or int(number) >= self.num_layers:
            return None
        return layer_tensors(self.hidden_size, self.layers[int(number)]).get(inner)

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight. Raises `UnsupportedModel` if the model has no weight with this name."""
        if name in _TABLES:
            return self.vocab_size, self.hidden_size
        if name == _FINAL_NORM:
            return (self.hidden_size,)
        tensor = self.tensor(name)
        if tensor is None:
            raise UnsupportedModel(f"the shape of {name} is unknown: kernels cannot be compiled ahead for this model")
        return tensor.shape

    def required_weights(self, has_tables: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every weight. Without `has_tables` the checkpoint has neither embedding nor head."""
        if has_tables:
            for name in _TABLES[: 1 if self.tie_embeddings else 2]:
                yield name, (self.vocab_size, self.hidden_size)
        yield _FINAL_NORM, (self.hidden_size,)
        for number in range(self.num_layers):
            for piece in self.pieces(number):
                yield from ((f"{_LAYERS}{number}.{tensor.name}", tensor.shape) for tensor in piece.tensors)

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = (
            count * sum(math.prod(tensor.shape) for tensor in layer_tensors(self.hidden_size, layer).values())
            for layer, count in Counter(self.layers).items()
        )
        return tables + sum(layers) + self.hidden_size
