"""Every tensor type against the reference implementation, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from paceline.core.errors import UnsupportedModel
from paceline.models.loading.gguf_file import num_bytes, unpack

ROWS, COLUMNS = 6, 512


def _stored(kind: Type) -> np.ndarray:
    """[ROWS, bytes] of a valid tensor: quantised where the reference can quantise, made of random blocks where not."""
    random = np.random.default_rng(0)
    if kind not in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        values = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(ROWS, -1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (ROWS * COLUMNS // block, size), dtype=np.uint8)
    halves = random.normal(size=(len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind is not Type.Q6_K:
        blocks[:, :4] = halves
    else:
        blocks[:, -2:] = halves[:, :2]
    return blocks.reshape(ROWS, -1)


SUPPORTED = (
    *(Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1),
    *(Type.Q4_K, Type.Q5_K, Type.Q6_K),
)


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_unpacking_is_exact(kind: Type) -> None:
    stored = _stored(kind)
    assert num_bytes(kind, ROWS * COLUMNS) == stored.size
    raw = stored.view(np.float16) if kind is Type.F16 else stored.view(np.float32) if kind is Type.F32 else stored
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(ROWS, COLUMNS))
    weight = unpack(kind, torch.from_numpy(stored).flatten(), (ROWS, COLUMNS))
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.IQ4_NL, Type.MXFP4], ids=lambda k: k.name)
def test_other_types_are_refused_by_name(kind: Type) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{kind.name} .*Q4_1.*Q6_K"):
        num_bytes(kind, 256)
