"""The order in which attention sums over the keys of a row. Every kernel of attention follows it, so that the bits of a row
depend on the row and its keys alone: not on other rows, on tiles, or on how keys are divided among programs.

- Keys are added in chunks of 64, at multiples of 64 of their position, one after another (`add_chunk`).
- Four chunks, at multiples of 256, are a part. A part begins with the empty state.
- Parts are joined from first to last to groups of 2,048 keys (`join`), and groups from first to last to the result.

A state is the highest score of a row, the sum of its weights, and its weighted values, all in float32. Scores are products of
queries and keys, before the scale. Weights are rounded to the type of the values. Adding a chunk that a row does not attend to
leaves its state as it is, to the bit, and so does a join with the empty state. Kernels may skip such chunks and parts or not.

Every sum of products is one `tl.dot`, which adds the products of 16 keys at a time, in order. `tl.sum` would add in an order
that depends on the threads. Every rounding is written out: products that the compiler could fuse with a sum are an `fma`.
"""

import triton
import triton.language as tl

from paceline.kernels.gpu.launch import hashed

LOG2_E = tl.constexpr(1.4426950408889634)
CHUNK_KEYS = tl.constexpr(64)
PART_KEYS = tl.constexpr(256)
GROUP_KEYS = tl.constexpr(2048)
STEP_KEYS = tl.constexpr(16)
"""Keys whose products a tensor core adds at once. Exact zeros may stand between two steps."""
NO_KEYS = tl.constexpr(-1e30)
"""Highest score of a row without keys. It is finite, so that no difference of two is NaN."""
_ONES = tl.constexpr(8)  # columns of the narrowest product


@hashed
@triton.jit
def empty_state(TILE: tl.constexpr, PADDED: tl.constexpr):
    """(top [TILE], norm [TILE, _ONES], total [TILE, PADDED]) of no keys. All columns of norm are equal."""
    top = tl.full([TILE], NO_KEYS, tl.float32)
    return top, tl.zeros([TILE, _ONES], tl.float32), tl.zeros([TILE, PADDED], tl.float32)


@hashed
@triton.jit
def squash(scores, factor, CAPPED: tl.constexpr):
    """tanh(scores * factor) if there is a cap of the scores: the cap is a part of `scale` then."""
    if not CAPPED:
        return scores
    x = scores * factor
    square = x * x
    near = tl.fma(square, tl.full(x.shape, -5.70498872745e-3, tl.float32), 2.06390887954e-2)
    near = tl.fma(square, near, -5.37397155531e-2)
    near = tl.fma(square, near, 1.33314422036e-1)
    near = tl.fma(square, near, -3.33332819422e-1)
    near = tl.fma(near * square, x, x)
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return tl.where(square < 0.390625, near, far)


@hashed
@triton.jit
def add_chunk(top, norm, total, scores, value, scale):
    """The state after the keys of one chunk. Scores of keys that a row does not attend to are -inf."""
    top, norm, total = raise_top(top, norm, total, tl.max(scores, 1), scale)
    norm, total = add_weights(top, norm, total, scores, value, scale)
    return top, norm, total


@hashed
@triton.jit
def raise_top(top, norm, total, highest, scale):
    """The state relative to the highest score of its keys and of the chunk that follows."""
    new_top = tl.maximum(top, highest)
    decay = tl.exp2((top - new_top) * scale)[:, None]
    return new_top, norm * decay, total * decay


@hashed
@triton.jit
def add_weights(top, norm, total, scores, value, scale):
    """(norm, total) with more keys, none of which has a score above `top`."""
    weights = tl.exp2(tl.fma(scores, scale, -(top * scale)[:, None])).to(value.dtype)
    ones = tl.full([scores.shape[1], _ONES], 1.0, tl.float32).to(value.dtype)
    norm = tl.dot(weights, ones, norm, input_precision="ieee")
    total = tl.dot(weights, value, total, input_precision="ieee")
    return norm, total


@hashed
@triton.jit
def join(top, norm, total, next_top, next_norm, next_total, scale):
    """The state of some keys and of the keys after them."""
    new_top = tl.maximum(top, next_top)
    factor, next_factor = tl.exp2((top - new_top) * scale)[:, None], tl.exp2((next_top - new_top) * scale)[:, None]
    norm = tl.fma(norm, factor, next_norm * next_factor)
    total = tl.fma(total, factor, next_total * next_factor)
    return new_top, norm, total


@hashed
@triton.jit
def finish(top, norm, total, sink, scale, SINKS: tl.constexpr):
    """[TILE, PADDED]: the output of a row. `sink` is the score of a key without a value; it is added after all keys."""
    norm = tl.max(norm, 1)
    if SINKS:
        norm += tl.exp2(tl.minimum(tl.fma(sink, LOG2_E, -(top * scale)), 120.0))
    return total * (1.0 / tl.where(norm > 0.0, norm, 1.0))[:, None]
