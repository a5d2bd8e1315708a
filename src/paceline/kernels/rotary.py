"""Rotary position embedding of q and k, fused with storing k and v in the paged cache.

Dimensions are paired as (i, i + hd/2), as in Hugging Face checkpoints. The model applies the per-head norm of q and k (Qwen3)
before.
"""

import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.formats.quantized import put, saturate


def apply_rotary_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """qkv [T, (H + 2 KV) hd], cos and sin [T, hd/2], caches [blocks, BLOCK_SIZE, KV, hd], slots [T] -> q [T, H, hd]."""
    if not native.supports(qkv) or key_cache.dtype is not torch.float32:
        return apply_rotary_and_store_reference(qkv, cos, sin, key_cache, value_cache, slots, num_heads, num_kv_heads)
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin, slots))
    assert cos.dtype is sin.dtype is value_cache.dtype is torch.float32
    assert slots.dtype is torch.int64
    rows, width = qkv.shape[0], key_cache.shape[3]
    query = torch.empty(rows, num_heads, width)
    native.library().for_rows(rows).paceline_rotary(  # type: ignore[union-attr]  # supports() checked it
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        rows,
        num_heads,
        num_kv_heads,
        width,
    )
    return query


def apply_rotary_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    rotated, value = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    low, high = rotated.float().chunk(2, -1)  # [T, H + KV, hd/2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated_heads = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(qkv.dtype)
    for cache, rows in ((key_cache, rotated_heads[:, num_heads:]), (value_cache, value)):
        put(cache.view(-1, num_kv_heads, cache.shape[3]), slots, saturate(rows, cache.dtype))
    return rotated_heads[:, :num_heads].contiguous()
