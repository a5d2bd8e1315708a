"""Cache blocks as bytes: how keys and values leave a runner's memory and come back, bit for bit.

A block is `[layers, 2, BLOCK_SIZE, kv_heads, head_dim]` in the cache's own dtype, keys before values; a layer of it is the
part `[2, …]`. Blocks that somebody may write to meanwhile must not be read: published ones never are. Of a runner that shares
its model with other ranks this is rank 0's part alone.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from paceline.models.runner import ModelRunner

Bytes: TypeAlias = "memoryview | bytearray | bytes"
Rows: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

CHUNK_BYTES = 64 << 20
"""Device memory that a copy of many blocks takes at a time."""


def layer_bytes(runner: ModelRunner) -> int:
    """Of one block in one layer, keys and values."""
    keys, _ = runner.cache[0]
    return 2 * keys[0].nbytes


def block_bytes(runner: ModelRunner) -> int:
    """Of one block in all layers."""
    return len(runner.cache) * layer_bytes(runner)


def read_layer(runner: ModelRunner, layer: int, blocks: Sequence[int], out: Bytes) -> None:
    """Into `out`: block by block, `layer_bytes` each. Returns when they are there."""
    _check(len(out), len(blocks) * layer_bytes(runner))
    _read(_pair(runner, layer), blocks, _rows(out, len(blocks), 2))


def write_layer(runner: ModelRunner, layer: int, blocks: Sequence[int], data: Bytes) -> None:
    """What `read_layer` gave, into these blocks of this runner. `data` may be reused afterwards."""
    _check(len(data), len(blocks) * layer_bytes(runner))
    _write(_pair(runner, layer), blocks, _rows(data, len(blocks), 2))


def read_blocks(runner: ModelRunner, blocks: Sequence[int], out: Bytes) -> None:
    """Into `out`: block by block, `block_bytes` each. Returns when they are there."""
    _check(len(out), len(blocks) * block_bytes(runner))
    _read(planes(runner), blocks, _rows(out, len(blocks), 2 * len(runner.cache)))


def write_blocks(runner: ModelRunner, blocks: Sequence[int], data: Bytes) -> None:
    """What `read_blocks` gave, into these blocks of this runner. `data` may be reused afterwards."""
    _check(len(data), len(blocks) * block_bytes(runner))
    _write(planes(runner), blocks, _rows(data, len(blocks), 2 * len(runner.cache)))


def planes(runner: ModelRunner) -> list[Tensor]:
    """The cache's memory as bytes, [num_blocks, E] for keys and values of every layer: any dtype is copied alike."""
    return [plane for layer in range(len(runner.cache)) for plane in _pair(runner, layer)]


def gather(sources: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """[len(blocks), len(sources), E] on the device, in one launch a plane."""
    index = _index(blocks, sources[0].device)
    out = torch.empty(len(blocks), len(sources), sources[0].shape[1], dtype=torch.uint8, device=sources[0].device)
    for i, plane in enumerate(sources):
        out[:, i] = plane[index]
    return out


def scatter(targets: Sequence[Tensor], blocks: Sequence[int], values: Tensor) -> None:
    """The other way round."""
    index = _index(blocks, targets[0].device)
    for i, plane in enumerate(targets):
        plane[index] = values[:, i]


def chunks(blocks: Sequence[int], bytes_each: int) -> list[slice]:
    """Which of `blocks` go together, so that they take no more than `CHUNK_BYTES`."""
    count = max(1, CHUNK_BYTES // bytes_each)
    return [slice(i, min(i + count, len(blocks))) for i in range(0, len(blocks), count)]


@torch.inference_mode()
def _read(sources: Sequence[Tensor], blocks: Sequence[int], out: Rows) -> None:
    if sources[0].device.type == "cpu":
        for i, plane in enumerate(sources):
            values = plane.numpy()
            for place, block in enumerate(blocks):
                out[place, i] = values[block]
        return
    for part in chunks(blocks, out.nbytes // max(1, len(blocks))):
        torch.from_numpy(out[part]).copy_(gather(sources, blocks[part]))


@torch.inference_mode()
def _write(targets: Sequence[Tensor], blocks: Sequence[int], data: Rows) -> None:
    if targets[0].device.type == "cpu":
        for i, plane in enumerate(targets):
            values = plane.numpy()
            for place, block in enumerate(blocks):
                values[block] = data[place, i]
        return
    for part in chunks(blocks, data.nbytes // max(1, len(blocks))):
        own = data[part] if data.flags.writeable else data[part].copy()  # torch takes no memory it must not write to
        scatter(targets, blocks[part], torch.from_numpy(own).to(targets[0].device))


def _index(blocks: Sequence[int], device: torch.device) -> Tensor:
    # NOTE: from memory that is not pinned the copy would wait for all that was launched before it
    return torch.tensor(blocks, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _pair(runner: ModelRunner, layer: int) -> list[Tensor]:
    return [values.view(torch.uint8).view(len(values), -1) for values in runner.cache[layer]]


def _rows(data: Bytes, count: int, num_planes: int) -> Rows:
    """[count, num_planes, E]"""
    flat = np.frombuffer(data, np.uint8)
    return flat.reshape(count, num_planes, len(flat) // max(1, count * num_planes))


def _check(got: int, wanted: int) -> None:
    if got != wanted:
        raise ValueError(f"these blocks take {wanted} bytes, and there are {got}")
