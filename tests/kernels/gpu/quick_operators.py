"""Operators of Triton's interpreter that call numpy at once, for operands whose types and shapes need nothing else.

Numpy broadcasts blocks, scalars and constants as the interpreter does, which makes a block of each operand first. The results
have the same bits. Operands of other types go through the interpreter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime.interpreter import TensorHandle

SCALARS = {id(tl.float32): np.float32, id(tl.int32): np.int32, id(tl.int64): np.int64}
"""Types that numpy computes as a GPU does, by their identity."""
_INTEGERS = {id(tl.int32), id(tl.int64)}
_ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_LOGIC = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_BOOL = np.dtype(bool)
_tensor, _block, _constant = tl.core.tensor, tl.core.block_type, tl.core.constexpr


def quick(name: str, computed: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of tensors with this name. `computed` is that of the interpreter."""
    if name in _ARITHMETIC:
        return _arithmetic(_ARITHMETIC[name], computed)
    if name in _COMPARISONS:
        return _comparison(_COMPARISONS[name], computed)
    if name in _LOGIC:
        return _logic(_LOGIC[name], computed)
    return {"__getitem__": _index, "to": _cast}.get(name, lambda computed: computed)(computed)


def _operands(lhs: Any, rhs: Any) -> tuple[Any, Any, Any] | None:
    """Type of the numbers of the result, its type, and numpy's right operand; None: the interpreter must find them."""
    number = lhs.dtype
    if id(number) not in SCALARS:
        return None
    if isinstance(rhs, _tensor):
        other = rhs.dtype
        if other is not number:
            if id(number) not in _INTEGERS or id(other) not in _INTEGERS:
                return None
            number = tl.int64
        kind = _common(number, lhs.type, rhs.type)
        return None if kind is None else (number, kind, rhs.handle.data)
    if rhs.__class__ is _constant:
        rhs = rhs.value
    if (rhs.__class__ is int and abs(rhs) < 2**31) or (rhs.__class__ is float and number is tl.float32):
        return number, lhs.type, SCALARS[id(number)](rhs)
    return None


def _common(number: Any, one: Any, other: Any) -> Any:
    """Type of `number` with the shape of both types together; None if their ranks differ."""
    if not one.is_block():
        if not other.is_block():
            return number
        shape = other.shape
    elif not other.is_block() or one.shape is other.shape:
        shape = one.shape
    elif len(one.shape) == len(other.shape):
        shape = list(np.broadcast_shapes(one.shape.values, other.shape.values))
    else:
        return None
    return _block(number, shape)


def _arithmetic(operate: Any, computed: Any) -> Any:
    is_sum = operate is np.add

    def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
        found = _operands(lhs, rhs)
        if found is not None:
            number, kind, right = found
            return _tensor(TensorHandle(operate(lhs.handle.data, right), number), kind)
        if is_sum and isinstance(rhs, _tensor) and id(rhs.dtype) in _INTEGERS and lhs.dtype.is_ptr():
            kind = _common(lhs.dtype, lhs.type, rhs.type)
            if kind is not None:
                width = max(1, lhs.dtype.element_ty.primitive_bitwidth // 8)
                data = lhs.handle.data + width * rhs.handle.data.astype(np.uint64)
                return _tensor(TensorHandle(data, lhs.dtype), kind)
        return computed(lhs, rhs)

    return operator


def _comparison(compare: Any, computed: Any) -> Any:
    def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
        found = _operands(lhs, rhs)
        if found is None:
            return computed(lhs, rhs)
        number, kind, right = found
        truth = _block(tl.int1, kind.shape) if kind.is_block() else tl.int1
        return _tensor(TensorHandle(compare(lhs.handle.data, right), number), truth)

    return operator


def _logic(operate: Any, computed: Any) -> Any:
    def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
        if isinstance(rhs, _tensor) and lhs.dtype is tl.int1 and rhs.dtype is tl.int1:
            one, other = lhs.handle, rhs.handle
            kind = _common(tl.int1, lhs.type, rhs.type)
            if kind is not None and one.data.dtype is _BOOL and other.data.dtype is _BOOL:
                return _tensor(TensorHandle(operate(one.data, other.data), one.dtype), kind)
        return computed(lhs, rhs)

    return operator


_ALL = slice(None)


def _index(computed: Any) -> Any:
    """New dimensions, as in `x[:, None]`."""

    def operator(value: Any, slices: Any, _semantic: Any = None) -> Any:
        if slices.__class__ is tuple and all(one is None or one == _ALL for one in slices) and value.type.is_block():
            data = value.handle.data[slices]
            return _tensor(TensorHandle(data, value.handle.dtype.scalar), _block(value.dtype, list(data.shape)))
        return computed(value, slices)

    return operator


def _cast(computed: Any) -> Any:
    def operator(value: Any, dtype: Any, *options: Any, **named: Any) -> Any:
        return (
            value if dtype is value.dtype and not options and not named else computed(value, dtype, *options, **named)
        )

    return operator
