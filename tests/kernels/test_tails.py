"""Every native kernel, for odd sizes, between memory that cannot be accessed.

The last byte of every input and output is followed by a page without access: a kernel that reads or writes a byte too far
ends the process. Addresses are aligned to one value only. The bits must be those of the same call on ordinary memory.
`make sanitize` runs these tests, and all others of the kernels, under AddressSanitizer and UBSan.
"""

import ctypes
import ctypes.util
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.activation import gated
from paceline.kernels.attention import paged_attention
from paceline.kernels.cache_slots import CacheSlots, Planes, copy_rows
from paceline.kernels.cpu.checksums import copy_crc32, word_sum
from paceline.kernels.experts import feed_experts, route
from paceline.kernels.formats.experts import Experts, Routing
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.linear import embedding_rows, linear, prepare
from paceline.kernels.rms_norm import add_rms_norm, norm_heads, rms_norm
from paceline.kernels.rotary import apply_rotary_and_store
from paceline.kernels.sampling import SampledRow, rank_sampled, sample, top, top_with_total
from tests.kernels.cases import FORMATS, generator, make_cache, make_layout, make_weight, needs_native

pytestmark = needs_native
WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 100)
ROWS = (1, 2, 3, 5, 8, 17)
_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


def guarded(values: Tensor) -> Tensor:
    """A copy whose memory ends at a page without access."""
    size, page = values.nbytes, mmap.PAGESIZE
    memory = mmap.mmap(-1, -(-size // page) * page + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _libc.mprotect(ctypes.c_void_p(start + len(memory) - page), ctypes.c_size_t(page), 0) == 0
    if not size:
        return values
    # NOTE: the tensor keeps `memory`, whose last page stays without access until it is unmapped
    offset = len(memory) - page - size
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=offset).view(values.shape)
    return copy.copy_(values)


def test_the_page_behind_a_tensor_cannot_be_accessed() -> None:
    values = guarded(torch.arange(5))
    end = f"{values.data_ptr() + values.nbytes:x}-"
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(end)]
    assert line.split()[1] == "---p" or line.split()[1] == "---s"


@contextmanager
def guarded_outputs() -> Iterator[None]:
    """Kernels allocate their outputs with `torch.empty` and `torch.empty_like`."""
    empty, empty_like = torch.empty, torch.empty_like
    patch = pytest.MonkeyPatch()
    patch.setattr(torch, "empty", lambda *size, **options: guarded(empty(*size, **options).fill_(7)))
    patch.setattr(torch, "empty_like", lambda values: guarded(empty_like(values).fill_(7)))
    try:
        yield
    finally:
        patch.undo()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def check(kernel: Callable[..., Any], *inputs: Any) -> None:
    """Results and changed inputs are equal with and without guards."""
    plain, fenced = (_copied(inputs, copy) for copy in (Tensor.clone, guarded))
    expected = kernel(*plain)
    with guarded_outputs():
        found = kernel(*fenced)
    for ours, theirs in zip(_tensors([found, fenced]), _tensors([expected, plain]), strict=True):
        assert torch.equal(ours, theirs)


def _copied(value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return copy(value)
    if isinstance(value, PackedWeight):
        return PackedWeight.of(value.form, [copy(tensor) for tensor in value.tensors])
    if isinstance(value, AttentionLayout):
        tensors = (value.slots, value.starts, value.context_lens, value.block_tables, value.ancestors)
        return AttentionLayout(*(_copied(tensor, copy) for tensor in tensors))
    return [_copied(item, copy) for item in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("kind", FORMATS)
def test_linear_and_embedding(kind: str, activations: Any) -> None:
    if activations == "int8" and not kind.startswith("q"):
        pytest.skip("dense weights have no codes")
    group = int(kind.split("_")[1]) if kind.startswith("q") else 1
    for outputs, inputs in (
        (1, 32),
        (7, 96),
        (33, 160),
        (65, 16 if group < 32 else 32),
        (40, 48 if group < 32 else 64),
    ):
        weight = prepare(make_weight(kind, outputs, inputs, activations=activations), "cpu", torch.float32)
        bias = randn(outputs)
        for rows in ROWS:
            check(linear, randn(rows, inputs, seed=rows), weight, bias)
        check(embedding_rows, weight, torch.tensor([0, outputs - 1, outputs // 2]))


@pytest.mark.parametrize("inputs", [1, 3, 17, 33])
def test_dense_rows_of_any_width(inputs: int) -> None:
    for rows in ROWS:
        check(linear, randn(rows, inputs), prepare(make_weight("float32", 5, inputs), "cpu", torch.float32))


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_activations(width: int) -> None:
    for rows in ROWS:
        x = randn(rows, width)
        check(rms_norm, x, randn(width), 1e-5)
        check(add_rms_norm, x, randn(rows, width, seed=1), randn(width), 1e-5)
        check(norm_heads, randn(rows, 5 * width), randn(width), randn(width), 3, 1, 1e-5)
        for kind in ("silu", "gelu_tanh", "clamped_swiglu"):
            check(gated, randn(rows, 2 * width), kind)


@pytest.mark.parametrize("width", [2, 6, 10, 18, 34, 66])
def test_rotary(width: int) -> None:
    for rows in ROWS:
        angles = randn(rows, width // 2)
        slots = torch.randperm(2 * BLOCK_SIZE, generator=generator(2))[:rows]
        caches = torch.zeros(2, BLOCK_SIZE, 2, width), torch.zeros(2, BLOCK_SIZE, 2, width)
        check(apply_rotary_and_store, randn(rows, 7 * width), angles.cos(), angles.sin(), *caches, slots, 3, 2)


@pytest.mark.parametrize("width", [16, 32, 48, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (6, 2), (5, 5)])
def test_attention(heads: int, kv_heads: int, width: int) -> None:
    for contexts, rows in (([0], [1]), ([1, 15], [3, 1]), ([16, 17, 33], [1, 2, 7])):
        keys, values = make_cache(
            sum(-(-(c + r) // BLOCK_SIZE) for c, r in zip(contexts, rows, strict=True)), kv_heads, width
        )
        layout = make_layout(contexts, rows, len(keys))
        q = randn(sum(rows), heads, width)
        for window, sinks in ((None, None), (3, None), (None, randn(heads))):
            check(paged_attention, q, keys, values, layout, 0.125, window, sinks)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_experts(is_normalized: bool) -> None:
    for count, chosen in ((1, 1), (3, 2), (9, 4), (17, 1)):
        for rows in ROWS:
            check(route, randn(rows, count), Routing(count, chosen, is_normalized))
    for kind, hidden, inner in (("float32", 32, 32), ("q8_32", 32, 96), ("q4_32", 96, 32)):
        matrices = [
            prepare(make_weight(name, outputs, inputs), "cpu", torch.float32)
            for name, outputs, inputs in (("float32", 3, hidden), (kind, 6 * inner, hidden), (kind, 3 * hidden, inner))
        ]

        def feed(x: Tensor, *weights: PackedWeight) -> Tensor:
            return feed_experts(x, Experts(Routing(3, 2, is_normalized), "silu", *weights, None, None, None))

        for rows in ROWS:
            check(feed, randn(rows, hidden), *matrices)


@pytest.mark.parametrize("width", WIDTHS)
def test_largest_values_and_samples(width: int) -> None:
    choices = (SamplingParams(temperature=0.7), SamplingParams(top_p=0.9, top_k=5), SamplingParams(min_p=0.1, top_k=1))
    for rows in ROWS:
        scores = randn(rows, width)
        check(top, scores, 1)
        check(top, scores, min(width, 5))
        check(top_with_total, scores - scores.amax(1, keepdim=True), min(width, 64))
        sampled = [SampledRow(choices[row % 3], 7 + row, row) for row in range(rows)]
        check(sample, scores, sampled)
        check(rank_sampled, scores, sampled, [row % 2 == 0 for row in range(rows)], None, min(width, 3))
        check(rank_sampled, scores, sampled, [True] * rows, torch.arange(width).flip(0), min(width, 64))


@pytest.mark.parametrize("row", [1, 3, 10, 33])
def test_copies_of_the_cache(row: int) -> None:
    def copy_slots(*caches: Tensor) -> None:
        CacheSlots(caches).copy([0, 5, 2 * BLOCK_SIZE - 1, 3], [2 * BLOCK_SIZE - 1, 0, 5, 7])

    def copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        copy_rows(Planes.of(sources), [4, 0], Planes.of(targets), [0, 2])

    check(copy_slots, randn(2, BLOCK_SIZE, row), randn(2, BLOCK_SIZE, row, seed=1))
    check(copy, [randn(5, 2 * row), randn(5, 2 * row)], [randn(3, 2 * row), randn(3, 2 * row)])


@pytest.mark.parametrize("size", [1, 3, 7, 9, 15, 17, 63, 65, 127, 129, 255, 257, 1023])
def test_checksums(size: int) -> None:
    data = torch.randint(0, 256, (size,), generator=generator(size), dtype=torch.uint8)

    def checksum(source: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(copy_crc32(memoryview(source.numpy()), memoryview(target.numpy())))

    check(checksum, data, torch.zeros_like(data))
    assert checksum(guarded(data), guarded(torch.zeros_like(data))) == zlib.crc32(data.numpy())
    check(lambda words: torch.tensor(word_sum(words) >> 1), torch.arange(size) * 2**40)
