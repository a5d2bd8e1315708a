"""Copies of KV cache blocks between a runner and byte buffers, exact to the bit.

A block is `[layers, 2, BLOCK_SIZE, kv_heads, head_dim]` in the dtype of the cache, keys before values; one layer of it is
`[2, …]`. Only read blocks that no pass writes at the same time, such as published blocks. With tensor parallelism, these
functions see the part of rank 0 only.
"""

import hashlib
import platform
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from paceline.core.version import VERSION
from paceline.kernels.cpu import native
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import ModelRunner

Bytes: TypeAlias = "memoryview | bytearray | bytes"
ByteArray: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

CHUNK_BYTES = 64 << 20
"""Device memory that a copy of many blocks uses at a time."""


def layer_bytes(runner: ModelRunner) -> int:
    """Bytes of one block in one layer, keys and values."""
    keys, _ = runner.cache[0]
    return 2 * keys[0].nbytes


def block_bytes(runner: ModelRunner) -> int:
    """Bytes of one block in all layers."""
    return len(runner.cache) * layer_bytes(runner)


def read_layer(runner: ModelRunner, layer: int, blocks: Sequence[int], out: Bytes) -> None:
    """Copy one layer of the blocks to `out`, `layer_bytes` per block. Returns when the copy is complete."""
    _check(len(out), len(blocks) * layer_bytes(runner))
    _read(_pair(runner, layer), blocks, _rows(out, len(blocks), 2))


def write_layer(runner: ModelRunner, layer: int, blocks: Sequence[int], data: Bytes) -> None:
    """Copy `data`, as `read_layer` returned it, to these blocks. `data` may be reused afterwards."""
    _check(len(data), len(blocks) * layer_bytes(runner))
    _write(_pair(runner, layer), blocks, _rows(data, len(blocks), 2))


def read_blocks(runner: ModelRunner, blocks: Sequence[int], out: Bytes) -> None:
    """Copy the blocks to `out`, `block_bytes` per block. Returns when the copy is complete."""
    _check(len(out), len(blocks) * block_bytes(runner))
    _read(planes(runner), blocks, _rows(out, len(blocks), 2 * len(runner.cache)))


def write_blocks(runner: ModelRunner, blocks: Sequence[int], data: Bytes) -> None:
    """Copy `data`, as `read_blocks` returned it, to these blocks. `data` may be reused afterwards."""
    _check(len(data), len(blocks) * block_bytes(runner))
    _write(planes(runner), blocks, _rows(data, len(blocks), 2 * len(runner.cache)))


def planes(runner: ModelRunner) -> list[Tensor]:
    """The cache as bytes: [num_blocks, E] uint8 for keys and for values of every layer."""
    return [plane for layer in range(len(runner.cache)) for plane in _pair(runner, layer)]


def gather(sources: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """[len(blocks), len(sources), E] on the device, with one launch per plane."""
    index = _index(blocks, sources[0].device)
    out = torch.empty(len(blocks), len(sources), sources[0].shape[1], dtype=torch.uint8, device=sources[0].device)
    for i, plane in enumerate(sources):
        out[:, i] = plane[index]
    return out


def scatter(targets: Sequence[Tensor], blocks: Sequence[int], values: Tensor) -> None:
    """Copy `values`, as `gather` returned them, to these blocks of the planes."""
    index = _index(blocks, targets[0].device)
    for i, plane in enumerate(targets):
        plane[index] = values[:, i]


def chunks(blocks: Sequence[int], bytes_each: int) -> list[slice]:
    """Slices of `blocks` of at most `CHUNK_BYTES` each."""
    count = max(1, CHUNK_BYTES // bytes_each)
    return [slice(i, min(i + count, len(blocks))) for i in range(0, len(blocks), count)]


def cache_fingerprint(runner: ModelRunner, weights: str, quantization: str) -> bytes:
    """32 bytes: a hash of everything besides its tokens that the bytes of a block depend on. Runners may exchange blocks only
    if their fingerprints are equal. `weights`: `weights_checksum` of the model; `quantization`: that of loading. Kernels of
    another version, device or processor may round differently, so they count too."""
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


@torch.inference_mode()
def _read(sources: Sequence[Tensor], blocks: Sequence[int], out: ByteArray) -> None:
    if sources[0].device.type == "cpu":
        for i, plane in enumerate(sources):
            values = plane.numpy()
            for row, block in enumerate(blocks):
                out[row, i] = values[block]
        return
    for part in chunks(blocks, out.nbytes // max(1, len(blocks))):
        torch.from_numpy(out[part]).copy_(gather(sources, blocks[part]))


@torch.inference_mode()
def _write(targets: Sequence[Tensor], blocks: Sequence[int], data: ByteArray) -> None:
    if targets[0].device.type == "cpu":
        for i, plane in enumerate(targets):
            values = plane.numpy()
            for row, block in enumerate(blocks):
                values[block] = data[row, i]
        return
    for part in chunks(blocks, data.nbytes // max(1, len(blocks))):
        values = data[part] if data.flags.writeable else data[part].copy()  # torch rejects read-only memory
        scatter(targets, blocks[part], torch.from_numpy(values).to(targets[0].device))


def _index(blocks: Sequence[int], device: torch.device) -> Tensor:
    # NOTE: a copy from memory that is not pinned waits for all work submitted before it
    return torch.tensor(blocks, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _pair(runner: ModelRunner, layer: int) -> list[Tensor]:
    return [values.view(torch.uint8).view(len(values), -1) for values in runner.cache[layer]]


def _rows(data: Bytes, count: int, num_planes: int) -> ByteArray:
    """[count, num_planes, E]"""
    flat = np.frombuffer(data, np.uint8)
    return flat.reshape(count, num_planes, len(flat) // max(1, count * num_planes))


def _check(got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"these blocks have {expected} bytes, and the buffer has {got}")
