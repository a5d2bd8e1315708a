"""The layer of an EAGLE head as one native call, a decoder layer whose input is twice as wide as its output."""

import torch
from torch import Tensor

from paceline.kernels.attention import HEAD_MULTIPLE
from paceline.kernels.decoder_layers import DecoderLayers, DecoderShape, LayerWeights
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.packing import PackedWeight
from paceline.models.drafts.eagle_weights import EagleWeights


class EagleLayer:
    """The layer of one head over one cache of keys and values."""

    def __init__(self, layers: DecoderLayers) -> None:
        self._layers = layers

    @classmethod
    def over(cls, head: EagleWeights, cache: tuple[Tensor, Tensor]) -> "EagleLayer | None":
        """None: a part of the layer needs its own call."""
        c, (keys, values) = head.config, cache
        matrices = (head.qkv, head.output, head.gate_up, head.down)
        packed = tuple(matrix for matrix in matrices if isinstance(matrix, PackedWeight))
        if len(packed) < len(matrices) or c.head_dim % HEAD_MULTIPLE or keys.dtype is not torch.float32:
            return None
        shape = DecoderShape(
            c.hidden_size, c.ffn_size, c.num_heads, c.num_kv_heads, c.head_dim, "silu", c.rms_eps, c.head_dim**-0.5
        )
        layer = LayerWeights(
            packed[0],
            packed[1],
            packed[2],
            packed[3],
            experts=None,
            qkv_bias=None,
            output_bias=None,
            q_norm=None,
            k_norm=None,
            sinks=None,
            attention_norm=None,
            feed_forward_norm=None,
            post_attention_norm=head.post_attention_norm,
            next_norm=head.final_norm,
            keys=keys,
            values=values,
            window=None,
            rotary=0,
        )
        return cls(DecoderLayers(shape, [layer]))

    def run(self, joined: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout) -> Tensor:
        """[T, D]: the states of the next slots, from the joined norms [T, 2 D] and the residual [T, D]. The memory of `joined`
        and `residual` is used for results."""
        self._layers.run(residual, joined, [(cos, sin)], layout, ())
        return residual
