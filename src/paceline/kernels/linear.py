"""y = x W^T (+ bias), and rows of W for a head that is also the embedding.

On the CPU in float32 the weight stays as the checkpoint has it, 4-bit codes included, and activations are never rounded
to fewer bits; elsewhere it is a dense tensor of the model's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels import native
from paceline.kernels.packing import PackedWeight
from paceline.kernels.weights import Weight


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    values: Tensor  # [N, K] on its device, in the model's dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


LinearWeight = DenseWeight | PackedWeight


def prepare(weight: Weight, device: torch.device | str, dtype: torch.dtype) -> LinearWeight:
    device = torch.device(device)
    if device.type == "cpu" and dtype == torch.float32 and native.available():
        return PackedWeight(weight)
    return DenseWeight(weight.dequantize().to(device, dtype))


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] -> [T, N]. A packed weight wants contiguous float32 rows on the CPU."""
    if isinstance(weight, DenseWeight):
        return dense_linear(x, weight.values, bias)
    assert x.dtype is torch.float32
    assert x.is_contiguous()
    assert x.shape[1] == weight.shape[1]
    rows = x.shape[0]
    out = torch.empty(rows, weight.shape[0])
    functions = native.library().for_rows(rows)  # type: ignore[union-attr]  # a packed weight exists
    functions.paceline_linear(
        weight.address, x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), rows
    )
    return out


def embedding_rows(weight: LinearWeight, ids: Tensor) -> Tensor:
    """Rows `ids` [T] int64 of W -> [T, K]: the dequantised values, bit for bit."""
    if isinstance(weight, DenseWeight):
        return weight.values[ids]
    ids = ids.contiguous()
    assert ids.dtype is torch.int64
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise IndexError(f"token ids must be in [0, {weight.shape[0]})")
    out = torch.empty(len(ids), weight.shape[1])
    functions = native.library().for_rows(len(ids))  # type: ignore[union-attr]  # a packed weight exists
    functions.paceline_embedding(weight.address, ids.data_ptr(), out.data_ptr(), len(ids))
    return out
