"""What a layer of a decoder computes, and with which sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.activation import Activation
from paceline.kernels.formats.experts import Scoring
from paceline.kernels.rope import FrequencyFactors, RopeScaling

Norms = Literal["pre", "pre_and_post", "post"]
"""Where a layer has RMS norms: before attention and the feed-forward layer, also at the outputs of both, or there only."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding of heads of `size` values."""

    size: int
    theta: float
    scaling: RopeScaling | None = None
    num_rotated: int | None = None
    """Values of a head that turn with the position, the first ones of the checkpoint. None if all turn."""
    exponent_width: int | None = None
    """Frequency i is theta ** (-2 i / exponent_width). None if it is the number of rotated values."""

    def __post_init__(self) -> None:
        turning = self.size if self.num_rotated is None else self.num_rotated
        if self.size % 2 or turning % 2 or not 0 <= turning <= self.size:
            raise UnsupportedModel(
                f"{turning} rotated values in heads of {self.size} have no rotary pairs: expected even sizes"
            )
        if isinstance(self.scaling, FrequencyFactors) and len(self.scaling.factors) != turning // 2:
            found = len(self.scaling.factors)
            raise UnsupportedModel(f"the rotary embedding has {found} factors, and the heads have {turning // 2} pairs")


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / period)) after the rotation."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Projections of attention through compressed states (MLA). Keys and values are cached for all heads, not compressed."""

    query_rank: int | None
    """Width of the compressed queries. None if queries are projected at once."""
    rank: int
    """Width of the compressed keys and values."""
    num_rotated: int
    """Last values of a head that turn with the position; keys have the same ones in all heads."""
    value_dim: int
    """Values of a head's output; those of the cache are followed by zeros."""


@dataclass(frozen=True, slots=True)
class OwnHeads:
    """Heads of a layer that are smaller or fewer than those of the cache, which are alike in all layers. They are filled with
    zeros, and key-value heads are repeated."""

    num_kv: int
    head_dim: int
    has_values: bool
    """Whether values have a projection; otherwise they are the keys before their norm."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of query heads to the cached keys and values of as many or fewer heads."""

    num: int
    num_kv: int
    head_dim: int
    score_scale: float | None = None
    """Factor of the scores. If None, it is head_dim ** -0.5."""
    has_bias: bool = False
    """Whether q, k and v have biases."""
    has_output_bias: bool = False
    has_qk_norm: bool = False
    """Whether each head of q and k has an RMS norm before the rotation."""
    has_sinks: bool = False
    """Whether the softmax of a head has one more score, without a value."""
    score_cap: float | None = None
    """If not None, a score s becomes cap * tanh(s / cap)."""
    has_joined_qk_norm: bool = False
    """Whether q and k have an RMS norm over all their heads before the rotation."""
    query_scale: QueryScale | None = None
    latent: Latent | None = None
    """If not None, how queries, keys and values are projected."""
    own: OwnHeads | None = None
    """If not None, the heads of the layer, whose values have an RMS norm without weights."""

    def __post_init__(self) -> None:
        if self.num % self.num_kv:
            raise UnsupportedModel(f"{self.num} heads do not divide into {self.num_kv} key-value heads")
        if self.latent is not None and self.latent.value_dim > self.head_dim:
            raise UnsupportedModel(f"values of {self.latent.value_dim} are not supported with keys of {self.head_dim}")
        if self.own is not None and (self.num_kv % self.own.num_kv or self.head_dim % 4 or self.own.head_dim % 4):
            raise UnsupportedModel(
                f"{self.own.num_kv} key-value heads of {self.own.head_dim} do not fit {self.num_kv} of {self.head_dim}"
            )

    @property
    def q_size(self) -> int:
        return self.num * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv * self.head_dim

    @property
    def output_size(self) -> int:
        """Width of the output of all heads."""
        if self.own is not None:
            return self.num * self.own.head_dim
        return self.q_size if self.latent is None else self.num * self.latent.value_dim

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """activation(gate) * up, and a product back to the hidden size."""

    width: int
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """A router, which chooses `per_token` of `num` feed-forward layers of `width` for each token."""

    num: int
    per_token: int
    width: int
    activation: Activation = "silu"
    normalizes: bool = True
    """Whether the weights of a token's experts add up to 1; otherwise those of all experts do."""
    has_bias: bool = False
    """Whether the router and the experts have biases."""
    scoring: Scoring = "softmax"
    has_choice_bias: bool = False
    """Whether a bias of each expert is added to its score in the choice of the experts, and not in their weights."""
    scale: float = 1.0
    """Factor of the weights."""
    shared_width: int = 0
    """Width of a feed-forward layer that all tokens use too. 0 if there is none."""
    num_groups: int = 1
    """Experts are chosen from `kept_groups` of so many groups, those with the best experts."""
    kept_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num:
            raise UnsupportedModel(f"{self.per_token} of {self.num} experts per token are not possible")
        if self.num_groups == 1:
            return
        size, rest = divmod(self.num, self.num_groups)
        if rest or size < 2 or not self.per_token <= size * self.kept_groups <= self.num:
            raise UnsupportedModel(
                f"{self.per_token} experts per token from {self.kept_groups} of {self.num_groups} groups of {self.num} experts "
                "are not possible"
            )


Attention = Heads
"""Kinds of attention. A further kind, such as attention to a compressed cache, is added as a union."""
FeedForward = DenseFeedForward | RoutedExperts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: Attention
    ffn: FeedForward
    norms: Norms = "pre"
    window: int | None = None
    """Number of tokens that a token attends to, itself included. None if it attends to all."""
    rotary: int = 0
    """Number of the layer's rotary embedding in `DecoderSpec.rotary`."""
    has_scale: bool = False
    """Whether the hidden state after the layer is multiplied by a weight."""


Windows = Sequence[int | None]
"""The window of each layer. None if the layer attends to all tokens."""


def make_layers(
    heads: Heads | Sequence[Heads],
    ffn: FeedForward | Sequence[FeedForward],
    norms: Norms,
    windows: Windows,
    rotary: Sequence[int],
) -> tuple[LayerSpec, ...]:
    """Layers that differ in their window, in the number of their rotary embedding, and in attention or feed-forward layer if
    `heads` or `ffn` has one for each."""
    attention = heads if isinstance(heads, Sequence) else [heads] * len(windows)
    fed = ffn if isinstance(ffn, Sequence) else [ffn] * len(windows)
    kinds = tuple(zip(attention, fed, windows, rotary, strict=True))
    made = {kind: LayerSpec(kind[0], kind[1], norms, *kind[2:]) for kind in kinds}
    return tuple(made[kind] for kind in kinds)
