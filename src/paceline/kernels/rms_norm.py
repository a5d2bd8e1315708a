"""y = x / sqrt(mean(x^2) + eps) * weight, optionally fused with the residual addition before it. Sums are float32."""

import torch
from torch import Tensor

from paceline.kernels.cpu import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] -> [T, D]."""
    if not native.supports(x):
        return rms_norm_reference(x, weight, eps)
    assert x.is_contiguous()
    assert weight.dtype is torch.float32
    rows, width = x.shape
    out = torch.empty(rows, width)
    native.library().for_rows(rows).paceline_rms_norm(  # type: ignore[union-attr]  # supports() checked it
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None, rows, width, eps
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), each [T, D]."""
    if not native.supports(x):
        total = x + residual
        return rms_norm_reference(total, weight, eps), total
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert weight.dtype is torch.float32
    rows, width = x.shape
    out, total = torch.empty(rows, width), torch.empty(rows, width)
    native.library().for_rows(rows).paceline_rms_norm(  # type: ignore[union-attr]  # supports() checked it
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), rows, width, eps
    )
    return out, total


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
    """qkv [T, (H + 2 KV) hd]: the norm of each head of q and k, in place."""
    if not native.supports(qkv):
        norm_heads_reference(qkv, q_weight, k_weight, num_heads, num_kv_heads, eps)
        return
    assert qkv.is_contiguous()
    assert q_weight.dtype is k_weight.dtype is torch.float32
    rows, width = qkv.shape[0], q_weight.shape[0]
    native.library().for_rows(rows).paceline_head_norm(  # type: ignore[union-attr]  # supports() checked it
        qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), rows, num_heads, num_kv_heads, width, eps
    )


def norm_heads_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> None:
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))  # [T, H + 2 KV, hd]
    keys = slice(num_heads, num_heads + num_kv_heads)
    for part, weight in ((heads[:, :num_heads], q_weight), (heads[:, keys], k_weight)):
        part.copy_(rms_norm_reference(part, weight, eps))


def norm_joined_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> None:
    """qkv [T, (H + 2 KV) hd]: the norm of all heads of q, and that of all heads of k, in place."""
    if not native.supports(qkv):
        queries, keys, _ = qkv.split([len(q_weight), len(k_weight), len(k_weight)], 1)
        for part, weight in ((queries, q_weight), (keys, k_weight)):
            part.copy_(rms_norm_reference(part, weight, eps))
        return
    assert qkv.is_contiguous()
    assert q_weight.dtype is k_weight.dtype is torch.float32
    rows, width = qkv.shape[0], len(q_weight) // num_heads
    native.library().for_rows(rows).paceline_joined_head_norm(  # type: ignore[union-attr]  # supports() checked it
        qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), rows, num_heads, num_kv_heads, width, eps
    )


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)
