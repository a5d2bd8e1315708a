"""Repairs of the interpreter of Triton 3.6. They are not used on a GPU.

The interpreter converts arrays of one element to integers, which numpy 2.4 rejects, so that loops cannot have loaded bounds. It
multiplies the bit patterns of bfloat16 as integers, and it does not round when it narrows. The order in which it sums a product
depends on the shape.

It also replaces the functions of the language again at each call inside a kernel, and computes every integer twice to detect
overflows. Both are switched off here; for further speed-ups see quick_interpreter.py.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from tests.kernels.gpu.quick_interpreter import speed_up

_NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
"""Types that the interpreter stores as unsigned integers."""
_STEP = 16
"""Products that a tensor core adds at once."""


@functools.cache
def repair() -> None:
    """Apply all repairs, once."""
    builder = interpreter.InterpreterBuilder
    patch_tensor, cast, dot = interpreter._patch_lang_tensor, builder.cast_impl, builder.create_dot

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(self: Any, source: Any, target: Any, *rounding: Any) -> Any:
        old, new = source.dtype.scalar, target.scalar
        if old not in _NARROW and new not in _NARROW:
            return cast(self, source, target)
        return interpreter.TensorHandle(_from_torch(_to_torch(source.data, old), new), new)

    def create_dot(self: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
        a, b = (convert(self, x, tl.float32) if x.dtype.scalar in _NARROW else x for x in (a, b))
        if c.data.dtype != np.float32 or a.data.dtype.kind != "f":
            return dot(self, a, b, c, *precision)
        return interpreter.TensorHandle(_add_products(a.data, b.data, c.data), c.dtype)

    interpreter._patch_lang_tensor = patch_lang_tensor
    builder.cast_impl = builder.create_fp_to_fp = convert
    builder.create_dot = create_dot
    # Loops count in Python's integers, for which constants of a module lack these operators
    tl.constexpr.__rmod__ = lambda self, other: other % self.value
    tl.constexpr.__rfloordiv__ = lambda self, other: other // self.value
    speed_up()
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _add_products(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + a b, as a tensor core adds: 16 products at a time to a float32 sum, in order. The bits depend on no other row."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for k in range(0, a.shape[-1], _STEP):
        c = (a[..., k : k + _STEP] @ b[..., k : k + _STEP, :] + c).astype(np.float32)
    return c


def _to_torch(data: np.ndarray, kind: Any) -> torch.Tensor:
    array = torch.from_numpy(np.array(data))
    return array.view(_NARROW[kind]) if kind in _NARROW else array


def _from_torch(values: torch.Tensor, kind: Any) -> np.ndarray:
    stored = interpreter._get_np_dtype(kind)
    if kind not in _NARROW:
        return values.to(torch.float32).numpy().astype(stored)
    return values.to(_NARROW[kind]).view(torch.uint16 if stored.itemsize == 2 else torch.uint8).numpy()
