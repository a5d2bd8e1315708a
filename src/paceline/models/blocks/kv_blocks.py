"""Copies of KV cache blocks between a runner and byte buffers, exact to the bit.

A block is `[layers, 2, BLOCK_SIZE, kv_heads, head_dim]` in the dtype of the cache, keys before values; one layer of it is
`[2, …]`. Only read blocks that no pass writes at the same time, such as published blocks. With tensor parallelism a block has
the heads of all ranks, in the format of one rank: `ModelRunner.head_shares`.
"""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.core.version import VERSION
from paceline.kernels.cache_slots import Planes, copy_rows
from paceline.kernels.cpu import native
from paceline.models.runner import Cache, ModelRunner

Bytes: TypeAlias = "memoryview | bytearray | bytes"
ByteArray: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

CHUNK_BYTES = 64 << 20
"""Device memory that a copy of many blocks uses at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadShare:
    """One share of the key-value heads, as bytes."""

    planes: list[Tensor]
    """[num_blocks, BLOCK_SIZE, E] uint8 for keys and for values of every layer."""
    copies: list[list[Tensor]]
    """The same planes of every further rank with these heads."""


def layer_bytes(runner: ModelRunner) -> int:
    """Bytes of one block in one layer, keys and values."""
    keys, _ = runner.cache[0]
    return 2 * keys[0].nbytes * runner.num_head_shares


def block_bytes(runner: ModelRunner) -> int:
    """Bytes of one block in all layers."""
    return len(runner.cache) * layer_bytes(runner)


def read_layer(runner: ModelRunner, layer: int, blocks: Sequence[int], out: Bytes) -> None:
    """Copy one layer of the blocks to `out`, `layer_bytes` per block. Returns when the copy is complete."""
    _check(len(out), len(blocks) * layer_bytes(runner))
    shares = head_shares(runner, range(layer, layer + 1))
    _read(shares, blocks, as_rows(out, len(blocks), shares))


def write_layer(runner: ModelRunner, layer: int, blocks: Sequence[int], data: Bytes) -> None:
    """Copy `data`, as `read_layer` returned it, to these blocks. `data` may be reused afterwards."""
    _check(len(data), len(blocks) * layer_bytes(runner))
    shares = head_shares(runner, range(layer, layer + 1))
    _write(shares, blocks, as_rows(data, len(blocks), shares))


def read_blocks(runner: ModelRunner, blocks: Sequence[int], out: Bytes) -> None:
    """Copy the blocks to `out`, `block_bytes` per block. Returns when the copy is complete."""
    _check(len(out), len(blocks) * block_bytes(runner))
    shares = head_shares(runner)
    _read(shares, blocks, as_rows(out, len(blocks), shares))


def write_blocks(runner: ModelRunner, blocks: Sequence[int], data: Bytes) -> None:
    """Copy `data`, as `read_blocks` returned it, to these blocks. `data` may be reused afterwards."""
    _check(len(data), len(blocks) * block_bytes(runner))
    shares = head_shares(runner)
    _write(shares, blocks, as_rows(data, len(blocks), shares))


def planes(runner: ModelRunner) -> list[Tensor]:
    """The cache of this process as bytes: [num_blocks, BLOCK_SIZE, E] uint8 for keys and for values of every layer."""
    return _planes(runner.cache)


def head_shares(runner: ModelRunner, layers: range | None = None) -> list[HeadShare]:
    """The caches of all ranks, in the order of heads. `layers` are the layers to return, by default all."""
    part = slice(None) if layers is None else slice(layers.start, layers.stop)
    found = []
    for copies in runner.head_shares():
        first, *others = (_planes(cache[part]) for cache in copies)
        found.append(HeadShare(first, others))
    return found


def as_rows(data: Bytes, count: int, shares: Sequence[HeadShare]) -> ByteArray:
    """[count, planes, BLOCK_SIZE, shares, E] for a buffer of `count` blocks."""
    flat = np.frombuffer(data, np.uint8)
    return flat.reshape(count, *row_shape(shares))


def row_shape(shares: Sequence[HeadShare]) -> tuple[int, int, int, int]:
    """(planes, BLOCK_SIZE, shares, E): the bytes of one block, or of one layer of it."""
    return len(shares[0].planes), BLOCK_SIZE, len(shares), shares[0].planes[0].shape[2]


def gather(sources: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """[len(blocks), len(sources), BLOCK_SIZE, E] on the device, with one launch."""
    shape = len(blocks), len(sources), *sources[0].shape[1:]
    out = torch.empty(shape, dtype=torch.uint8, device=sources[0].device)
    copy_rows(Planes.of(sources), blocks, _rows_of(out), range(len(blocks)))
    return out


def scatter(targets: Sequence[Tensor], blocks: Sequence[int], values: Tensor) -> None:
    """Copy `values`, as `gather` returned them, to these blocks of the planes, with one launch."""
    copy_rows(_rows_of(values), range(len(blocks)), Planes.of(targets), blocks)


@torch.inference_mode()
def copy_blocks(
    sources: Sequence[Tensor], numbers: Sequence[int], shares: Sequence[HeadShare], blocks: Sequence[int]
) -> None:
    """Start to copy blocks `numbers` of `sources`, planes on a device with the heads of all ranks, to `blocks` of all ranks, in
    one launch unless they are divided among ranks."""
    for number, share in enumerate(shares):
        for targets in (share.planes, *share.copies):
            if len(shares) == 1 and targets[0].device == sources[0].device:
                copy_rows(Planes.of(sources), numbers, Planes.of(targets), blocks)
                continue
            index, to = _index(numbers, sources[0].device), _index(blocks, targets[0].device)
            for source, target in zip(sources, targets, strict=True):
                own = source.view(len(source), BLOCK_SIZE, len(shares), -1)[:, :, number]
                target.index_copy_(0, to, own.index_select(0, index).to(target.device))


def chunks(blocks: Sequence[int], bytes_each: int) -> list[slice]:
    """Slices of `blocks` of at most `CHUNK_BYTES` each."""
    count = max(1, CHUNK_BYTES // bytes_each)
    return [slice(i, min(i + count, len(blocks))) for i in range(0, len(blocks), count)]


def cache_fingerprint(runner: ModelRunner, weights: str, quantization: str) -> bytes:
    """A hash of 32 bytes over everything, except its tokens, that the bytes of a block depend on. Runners may exchange blocks
    only if their fingerprints are equal. `weights` is the model's `weights_checksum`, and `quantization` is that of loading.
    Kernels of another version, device or processor may round differently, so they count too."""
    is_native = runner.device.type == "cpu" and native.available()
    parts = (
        ("weights", weights),
        ("quantization", quantization),
        ("model", repr(runner.model.config)),
        ("dtype", str(runner.model.dtype)),
        ("cache", f"{runner.cache[0][0].dtype} {tuple(runner.cache[0][0].shape[1:])} x {len(runner.cache)}"),
        ("block", str(BLOCK_SIZE)),
        ("device", runner.device.type),
        ("kernels", f"{VERSION} {platform.machine()} {'native' if is_native else 'torch'}"),
    )
    return hashlib.sha256("".join(f"{name}: {value}\n" for name, value in parts).encode()).digest()


def load_kernels(runner: ModelRunner) -> None:
    """Load the kernels of all copies, which takes a moment the first time, before a request waits for one."""
    if runner.device.type == "cuda":
        with torch.cuda.device(runner.device):
            first = [torch.zeros_like(plane[:1]) for plane in planes(runner)[:2]]
            scatter(first, [0], gather(first, [0]))
            copy_blocks(first, [0], [HeadShare([torch.zeros_like(plane) for plane in first], [])], [0])


def copy_out(share: HeadShare, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
    """Copy blocks of a cache on the CPU to `rows`, [planes, BLOCK_SIZE, E] for each block."""
    for i, plane in enumerate(share.planes):
        values = plane.numpy()
        for row, block in zip(rows, blocks, strict=True):
            row[i] = values[block]


def copy_in(share: HeadShare, blocks: Sequence[int], rows: Sequence[ByteArray]) -> None:
    """Copy `rows`, as `copy_out` returned them, to these blocks of all ranks with these heads, on the CPU."""
    for targets in (share.planes, *share.copies):
        for i, plane in enumerate(targets):
            values = plane.numpy()
            for row, block in zip(rows, blocks, strict=True):
                values[block] = row[i]


def finish_writes(shares: Sequence[HeadShare]) -> None:
    """Wait for copies to the GPUs of other ranks, whose passes use other streams. Without ranks the stream orders them."""
    written = [targets[0] for share in shares for targets in (share.planes, *share.copies)]
    if len(written) > 1 and written[0].is_cuda:
        for plane in written:
            torch.cuda.synchronize(plane.device)


@torch.inference_mode()
def _read(shares: Sequence[HeadShare], blocks: Sequence[int], out: ByteArray) -> None:
    for number, share in enumerate(shares):
        rows = out[:, :, :, number]
        if share.planes[0].device.type == "cpu":
            if len(shares) == 1:
                copy_rows(Planes.of(share.planes), blocks, _rows_in(rows), range(len(blocks)))
            else:
                copy_out(share, blocks, list(rows))
            continue
        for part in chunks(blocks, out.nbytes // max(1, len(blocks))):
            torch.from_numpy(rows[part]).copy_(gather(share.planes, blocks[part]))


@torch.inference_mode()
def _write(shares: Sequence[HeadShare], blocks: Sequence[int], data: ByteArray) -> None:
    for number, share in enumerate(shares):
        rows = data[:, :, :, number]
        if share.planes[0].device.type == "cpu":
            if len(shares) == 1:
                for targets in (share.planes, *share.copies):
                    copy_rows(_rows_in(rows), range(len(blocks)), Planes.of(targets), blocks)
            else:
                copy_in(share, blocks, list(rows))
            continue
        for part in chunks(blocks, data.nbytes // max(1, len(blocks))):
            # torch rejects read-only memory
            values = torch.from_numpy(rows[part] if rows.flags.writeable else rows[part].copy())
            for targets in (share.planes, *share.copies):
                scatter(targets, blocks[part], values.to(targets[0].device).contiguous())
    finish_writes(shares)


def _index(blocks: Sequence[int], device: torch.device) -> Tensor:
    # NOTE: a copy from memory that is not pinned waits for all work submitted before it
    return torch.tensor(blocks, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _rows_of(values: Tensor) -> Planes:
    """[n, planes, BLOCK_SIZE, E], contiguous, as rows."""
    return Planes.interleaved(values.device, values.data_ptr(), values.shape[1], values.shape[2] * values.shape[3])


def _rows_in(rows: ByteArray) -> Planes:
    """The same for values in host memory, which may be read-only."""
    assert rows.flags.c_contiguous
    return Planes.interleaved(torch.device("cpu"), rows.ctypes.data, rows.shape[1], rows.shape[2] * rows.shape[3])


def _planes(cache: Cache) -> list[Tensor]:
    return [values.view(torch.uint8).view(len(values), BLOCK_SIZE, -1) for layer in cache for values in layer]


def _check(got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"these blocks have {expected} bytes, and the buffer has {got}")
