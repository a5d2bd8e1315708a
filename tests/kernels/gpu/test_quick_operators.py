"""The quick operators of the interpreter have the values, types and shapes of the interpreter's own."""

import operator
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")

OPERATORS = {
    operator.add: lambda one, other: interpreter_semantic.add(one, other, False),
    operator.sub: lambda one, other: interpreter_semantic.sub(one, other, False),
    operator.mul: lambda one, other: interpreter_semantic.mul(one, other, False),
    operator.lt: interpreter_semantic.less_than,
    operator.le: interpreter_semantic.less_equal,
    operator.gt: interpreter_semantic.greater_than,
    operator.ge: interpreter_semantic.greater_equal,
    operator.eq: interpreter_semantic.equal,
    operator.ne: interpreter_semantic.not_equal,
}
TYPES = {tl.float32: np.float32, tl.int32: np.int32, tl.int64: np.int64, tl.int1: np.bool_}
SHAPES = ((), (8,), (4, 1), (1, 8), (4, 8))


def tensor(kind: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    values = np.random.default_rng(seed).integers(0, 2 if kind is tl.int1 else 5, shape or (1,)).astype(TYPES[kind])
    return tl.core.tensor(TensorHandle(values, kind), tl.core.block_type(kind, list(shape)) if shape else kind)


def check(found: Any, expected: Any) -> None:
    assert found.type == expected.type
    assert found.handle.dtype == expected.handle.dtype
    assert found.handle.data.dtype == expected.handle.data.dtype
    assert found.handle.data.shape == expected.handle.data.shape
    assert np.array_equal(found.handle.data, expected.handle.data)


@pytest.mark.parametrize("operate", OPERATORS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("one", [tl.float32, tl.int32, tl.int64], ids=str)
def test_numbers(operate: Any, one: Any) -> None:
    for other in (tl.float32, tl.int32, tl.int64):
        for left in SHAPES:
            for right in SHAPES:
                pair = tensor(one, left), tensor(other, right, seed=1)
                check(operate(*pair), OPERATORS[operate](*pair))
    for shape in SHAPES:
        for constant in (0, 3, -7, *((0.5, -0.0) if one is tl.float32 else ())):
            value = tensor(one, shape)
            check(operate(value, constant), OPERATORS[operate](value, interpreter_semantic.to_tensor(constant)))


@pytest.mark.parametrize("element", [tl.float32, tl.int1, tl.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [tl.int32, tl.int64], ids=str)
def test_pointers(element: Any, offset: Any) -> None:
    kind = tl.core.pointer_type(element)
    for left in SHAPES:
        for right in SHAPES:
            data = np.arange(1000, 1000 + np.prod(left, dtype=int), dtype=np.uint64).reshape(left or (1,))
            start = tl.core.tensor(TensorHandle(data, kind), tl.core.block_type(kind, list(left)) if left else kind)
            moves = tensor(offset, right) - 2
            check(start + moves, interpreter_semantic.add(start, moves, False))


@pytest.mark.parametrize("operate", [operator.and_, operator.or_])
def test_conditions(operate: Any) -> None:
    own = {operator.and_: interpreter_semantic.and_, operator.or_: interpreter_semantic.or_}
    for left in SHAPES:
        for right in SHAPES:
            pair = tensor(tl.int1, left), tensor(tl.int1, right, seed=1)
            check(operate(*pair), own[operate](*pair))


def test_new_dimensions_and_casts() -> None:
    line, plane = tensor(tl.float32, (4,)), tensor(tl.int32, (4, 8))
    check(line[:, None], interpreter_semantic.expand_dims(line, 1))
    check(line[None, :], interpreter_semantic.expand_dims(line, 0))
    check(plane[:, None, :], interpreter_semantic.expand_dims(plane, 1))
    assert line.to(tl.float32) is line
    check(plane.to(tl.float32), interpreter_semantic.cast(plane, tl.float32))
    with pytest.raises(ValueError, match="unsupported tensor index"):
        line[1:, None]
