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


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
