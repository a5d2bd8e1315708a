"""The native calls of an EAGLE head over one cache."""

import torch
from torch import Tensor

from paceline.kernels.attention import HEAD_MULTIPLE
from paceline.kernels.decoder_layers import DecoderShape, LayerWeights
from paceline.kernels.eagle_head import EagleHead, HeadWeights
from paceline.kernels.packing import PackedWeight
from paceline.models.drafts.eagle_weights import EagleWeights


def native_head(head: EagleWeights, cache: tuple[Tensor, Tensor]) -> EagleHead | None:
    """The head as one native call. None if a part of the head needs its own call."""
    c, (keys, values) = head.config, cache
    matrices = (head.qkv, head.output, head.gate_up, head.down, head.embedding, head.fc, head.vocabulary.head)
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
    return EagleHead(
        HeadWeights(
            shape,
            layer,
            embedding=packed[4],
            fc=packed[5],
            vocabulary=packed[6],
            input_norm=head.input_norm,
            hidden_norm=head.hidden_norm,
            cos=head.cos,
            sin=head.sin,
            ids=head.vocabulary.ids,
            is_residual_normed=c.norm_before_residual,
        )
    )
