"""y = x W^T (+ bias), and rows of W for embeddings.

On the CPU in float32 a weight keeps the format of the checkpoint, including 4-bit codes. Products with codes round activations
to int8 in groups of 32, unless the weight's `activations` is float32. Elsewhere a weight is a dense tensor in the model's
dtype, 8-bit values with scales, or the 4-bit codes of a checkpoint.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.cpu import native
from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.kernels.formats.weights import Dense, Weight, grouped


def prepare(weight: Weight, device: torch.device | str, dtype: torch.dtype) -> LinearWeight:
    """The weight on its device, in the format that the kernels of the device read."""
    device = torch.device(device)
    is_native = device.type == "cpu" and dtype == torch.float32 and native.available()
    if isinstance(weight, QuantizedWeight):
        codes = grouped(weight) if is_native else None
        if codes is not None:
            return PackedWeight(codes)
        return QuantizedWeight(weight.values.to(device), weight.scales.to(device))
    if is_native:
        return PackedWeight(weight)
    # No conversion through float32: a matrix generated on the device would exist three times
    values = weight.values if isinstance(weight, Dense) else weight.dequantize()
    return DenseWeight(values.to(device, dtype))


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] -> [T, N]. A packed weight needs contiguous float32 rows on the CPU."""
    if isinstance(weight, DenseWeight):
        return dense_linear(x, weight.values, bias)
    if isinstance(weight, QuantizedWeight | FourBitWeight):
        return quantized_linear_reference(x, weight, bias)
    assert x.dtype is torch.float32
    assert x.is_contiguous()
    assert x.shape[1] == weight.shape[1]
    rows = x.shape[0]
    out = torch.empty(rows, weight.shape[0])
    functions = native.library().for_rows(rows)  # type: ignore[union-attr]  # a packed weight implies native kernels
    functions.paceline_linear(
        weight.address, x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), rows
    )
    return out


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight | FourBitWeight, bias: Tensor | None = None
) -> Tensor:
    """Computed in float32 and rounded once."""
    wide_bias = None if bias is None else bias.float()
    return dense_linear(x.float(), weight.dequantize(), wide_bias).to(x.dtype)


def embedding_rows(weight: LinearWeight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] int64 of W -> [T, K]: exactly the dequantised values."""
    if isinstance(weight, DenseWeight):
        return weight.values[ids]
    assert isinstance(weight, PackedWeight)  # embeddings are never quantised: a lookup reads few bytes
    ids = ids.contiguous()
    assert ids.dtype is torch.int64
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise IndexError(f"token ids must be in [0, {weight.shape[0]})")
    out = torch.empty(len(ids), weight.shape[1])
    functions = native.library().for_rows(len(ids))  # type: ignore[union-attr]  # a packed weight implies native kernels
    functions.paceline_embedding(weight.address, ids.data_ptr(), out.data_ptr(), len(ids))
    return out
