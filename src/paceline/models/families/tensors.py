"""Names and shapes of the weights of a layer, how they are joined in memory, and how they are divided among ranks.

All of it follows from the `LayerSpec`. Names are those of Hugging Face checkpoints of Llama and Qwen3-MoE; weights that a
family stores otherwise are read under these names (`models/weights/family_weights.py`).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from paceline.models.families.layers import LayerSpec, RoutedExperts

Divided = Literal["query", "key_value", "inner"]
"""What a rank has a share of: query heads, key-value heads, or the width of the feed-forward layer."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored weight of a layer."""

    name: str
    """Without the layer, as in `self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    outputs: Divided | None = None
    """How the outputs are divided among ranks. None if a rank has all of them."""
    inputs: Divided | None = None


@dataclass(frozen=True, slots=True)
class PieceSpec:
    """Weights of a layer that are one tensor or matrix in memory, joined along their outputs."""

    attribute: str
    """The attribute of a layer that has it."""
    tensors: tuple[TensorSpec, ...]
    is_norm: bool = False
    is_float32: bool = False
    """Whether its values stay float32 in models of other types."""

    @property
    def is_matrix(self) -> bool:
        return len(self.tensors[0].shape) > 1

    @property
    def outputs(self) -> Divided | None:
        return self.tensors[0].outputs

    @property
    def inputs(self) -> Divided | None:
        return self.tensors[0].inputs


@lru_cache(maxsize=64)
def layer_pieces(hidden_size: int, layer: LayerSpec) -> tuple[PieceSpec, ...]:
    """The pieces of a layer in the order in which they are transferred: norms, biases, matrices."""
    heads, ffn = layer.attention, layer.ffn
    norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    if layer.norms == "pre_and_post":
        norms |= {
            "post_attention_norm": "pre_feedforward_layernorm",
            "attention_norm": "post_attention_layernorm",
            "feed_forward_norm": "post_feedforward_layernorm",
        }
    if layer.norms == "post":
        norms = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
    pieces = [_norm(attribute, name, hidden_size) for attribute, name in norms.items()]
    head_dim, kv_size, has_values = heads.head_dim, heads.kv_size, True
    if heads.own is not None:
        head_dim, has_values = heads.own.head_dim, heads.own.has_values
        kv_size = heads.own.num_kv * head_dim
    if layer.has_scale:
        pieces.append(PieceSpec("layer_scale", (TensorSpec("layer_scalar", (1,)),)))
    if heads.has_qk_norm:
        pieces += [_norm(f"{part}_norm", f"self_attn.{part}_norm", head_dim) for part in "qk"]
    if heads.has_joined_qk_norm:
        sizes = (("q", heads.q_size), ("k", heads.kv_size))
        pieces += [_norm(f"{part}_norm", f"self_attn.{part}_norm", size) for part, size in sizes]
    if heads.has_sinks:
        pieces.append(PieceSpec("sinks", (TensorSpec("self_attn.sinks", (heads.num,)),)))
    parts: tuple[tuple[str, int, Divided], ...] = (
        ("q", heads.num * head_dim, "query"),
        ("k", kv_size, "key_value"),
        ("v", kv_size, "key_value"),
    )
    parts = parts if has_values else parts[:2]
    if heads.has_bias:
        biases = (TensorSpec(f"self_attn.{part}_proj.bias", (size,), divided) for part, size, divided in parts)
        pieces.append(PieceSpec("qkv_bias", tuple(biases)))
    if heads.has_output_bias:
        pieces.append(PieceSpec("output_bias", (TensorSpec("self_attn.o_proj.bias", (hidden_size,)),)))
    owners = ["mlp"]
    if isinstance(ffn, RoutedExperts):
        owners = [f"mlp.experts.{number}" for number in range(ffn.num)]
        if ffn.has_bias:
            gate_up = (TensorSpec(f"{owner}.{part}_proj.bias", (ffn.width,)) for owner in owners for part in _GATE_UP)
            down = (TensorSpec(f"{owner}.down_proj.bias", (hidden_size,)) for owner in owners)
            pieces += [
                PieceSpec("router_bias", (TensorSpec("mlp.gate.bias", (ffn.num,)),)),
                PieceSpec("gate_up_bias", tuple(gate_up)),
                PieceSpec("down_bias", tuple(down)),
            ]
        if ffn.has_choice_bias:
            bias = TensorSpec("mlp.gate.e_score_correction_bias", (ffn.num,))
            pieces.append(PieceSpec("choice_bias", (bias,), is_float32=True))
    qkv = tuple(
        TensorSpec(f"self_attn.{part}_proj.weight", (size, hidden_size), divided) for part, size, divided in parts
    )
    if heads.latent is not None:
        latent = heads.latent
        pieces.append(_norm("latent_norm", "self_attn.kv_a_layernorm", latent.rank))
        kept = (heads.head_dim - latent.num_rotated + latent.value_dim) * heads.num
        inner = [PieceSpec("kv_out", (TensorSpec("self_attn.kv_b_proj.weight", (kept, latent.rank)),))]
        first = TensorSpec("self_attn.q_proj.weight", (heads.q_size, hidden_size))
        if latent.query_rank is not None:
            pieces.append(_norm("query_norm", "self_attn.q_a_layernorm", latent.query_rank))
            shape = heads.q_size, latent.query_rank
            inner.append(PieceSpec("query_out", (TensorSpec("self_attn.q_b_proj.weight", shape),)))
            first = TensorSpec("self_attn.q_a_proj.weight", (latent.query_rank, hidden_size))
        compressed = latent.rank + latent.num_rotated
        qkv = first, TensorSpec("self_attn.kv_a_proj_with_mqa.weight", (compressed, hidden_size))
        pieces += inner
    gate_up = (
        TensorSpec(f"{owner}.{part}_proj.weight", (ffn.width, hidden_size), "inner")
        for owner in owners
        for part in _GATE_UP
    )
    down = (TensorSpec(f"{owner}.down_proj.weight", (hidden_size, ffn.width), inputs="inner") for owner in owners)
    output = TensorSpec("self_attn.o_proj.weight", (hidden_size, heads.output_size), inputs="query")
    pieces += [
        PieceSpec("qkv", qkv),
        PieceSpec("output", (output,)),
        PieceSpec("gate_up", tuple(gate_up)),
        PieceSpec("down", tuple(down)),
    ]
    if isinstance(ffn, RoutedExperts):
        if ffn.shared_width:
            shape, stem = (ffn.shared_width, hidden_size), "mlp.shared_experts"
            joined = (TensorSpec(f"{stem}.{part}_proj.weight", shape, "inner") for part in _GATE_UP)
            pieces += [
                PieceSpec("shared_gate_up", tuple(joined)),
                PieceSpec("shared_down", (TensorSpec(f"{stem}.down_proj.weight", shape[::-1], inputs="inner"),)),
            ]
        pieces.append(PieceSpec("router", (TensorSpec("mlp.gate.weight", (ffn.num, hidden_size)),)))
    return tuple(pieces)


_GATE_UP = ("gate", "up")


def _norm(attribute: str, name: str, size: int) -> PieceSpec:
    return PieceSpec(attribute, (TensorSpec(f"{name}.weight", (size,)),), is_norm=True)


@lru_cache(maxsize=64)
def layer_tensors(hidden_size: int, layer: LayerSpec) -> dict[str, TensorSpec]:
    """The weights of a layer by name."""
    return {tensor.name: tensor for piece in layer_pieces(hidden_size, layer) for tensor in piece.tensors}
