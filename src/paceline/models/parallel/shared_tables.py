"""The target's embedding and head, as a draft of it uses them, and the draft's own matrices.

A draft made for a small model also serves a larger one that computes the same function inside itself: there the small
model's hidden states are the first columns of the large one's, and so are its tables.
"""

import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.linear import LinearWeight, embedding_rows, prepare
from paceline.kernels.quantized import QuantizedWeight, quantize
from paceline.kernels.weights import GROUPS, Dense, Weight
from paceline.models.architectures.llama import DecoderModel


def inner_width(target: DecoderModel, hidden_size: int) -> int:
    """`hidden_size` where the target contains a model that narrow, otherwise the target's own.

    It does if no token has anything in the other columns: only an inflated model is so empty.
    """
    width = target.config.hidden_size
    if not 0 < hidden_size < width:
        return width
    rest = _rows(target.embedding, torch.arange(target.config.vocab_size, device=target.device))[:, hidden_size:]
    return width if bool(rest.any()) else hidden_size


def embedding_for(target: DecoderModel, hidden_size: int) -> LinearWeight:
    """[V, hidden_size]: the target's own, or its first columns."""
    if hidden_size == target.config.hidden_size:
        return target.embedding
    rows = _rows(target.embedding, torch.arange(target.config.vocab_size, device=target.device))[:, :hidden_size]
    return prepare(Dense(rows.to(torch.bfloat16).contiguous()), target.device, target.dtype)


def head_for(target: DecoderModel, hidden_size: int, ids: Tensor | None) -> LinearWeight:
    """[V, hidden_size], or of the rows `ids` alone."""
    if hidden_size == target.config.hidden_size:
        if ids is None:
            return target.head
        if isinstance(target.head, QuantizedWeight):
            return QuantizedWeight(target.head.values[ids], target.head.scales[ids])
    rows = torch.arange(target.config.vocab_size, device=target.device) if ids is None else ids
    return _copy(target.head, rows, hidden_size, target)


def _copy(weight: LinearWeight, ids: Tensor, hidden_size: int, target: DecoderModel) -> LinearWeight:
    return prepare_draft(Dense(_rows(weight, ids)[:, :hidden_size].contiguous()), target.device, target.dtype)


def prepare_draft(weight: Weight, device: torch.device, dtype: torch.dtype) -> LinearWeight:
    """As `prepare`, but in 8 bits for the native kernels, whose passes cost what they read: a draft may be a little off."""
    is_native = device.type == "cpu" and dtype == torch.float32 and native.available()
    if is_native and isinstance(weight, Dense) and weight.shape[1] % GROUPS[-1] == 0:
        weight = quantize(weight.values.float(), "int8")
    return prepare(weight, device, dtype)


def _rows(weight: LinearWeight, ids: Tensor) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values[ids], weight.scales[ids]).dequantize()
    return embedding_rows(weight, ids)
