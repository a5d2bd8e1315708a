"""For gpu_families.py: the time of 4-bit matrices of the 8B shape with cold weights, by tile."""

import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial

import torch
from gpu_families_models import PARTS, random_four_bit
from gpu_runs import BANDWIDTH, replay_seconds

from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.gpu.tiles import RowClass, Tile, four_bit_key, four_bit_tile

COLD_BYTES = 400e6
"""Weights of one graph: more than the L2 cache holds."""
TUNED_ROWS = 1, 64


@dataclass(frozen=True)
class Matrix:
    name: str
    outputs: int
    inputs: int
    is_paired: bool
    """Whether `gate_up` computes it, from states before the norm; otherwise `linear` does."""

    @property
    def nbytes(self) -> float:
        return self.outputs * self.inputs * 4.25 / 8

    def weights(self, generator: torch.Generator) -> list[FourBitWeight]:
        count = max(2, int(COLD_BYTES / self.nbytes))
        return [random_four_bit(self.outputs, self.inputs, "float16", 0.02, generator) for _ in range(count)]


MATRICES = (
    Matrix("qkv", 6144, 4096, True),
    Matrix("output", 4096, 4096, False),
    Matrix("gate and up", 28672, 4096, True),
    Matrix("down", 4096, 14336, False),
)


def kernel_lines(is_tuned: bool, part: int | None) -> Iterator[str]:
    """The fastest tiles of each matrix. `is_tuned`: of many, with the best of all as JSON. `part`: of every eighth tile."""
    yield "| matrix | rows | tile | us | floor, us | share |"
    generator, best = torch.Generator("cuda").manual_seed(0), dict[str, list[int]]()
    for matrix in MATRICES:
        weights, outputs, inputs = matrix.weights(generator), matrix.outputs, matrix.inputs
        for rows in (1, 8, 16, 64):
            tiles = [four_bit_tile(rows, outputs, inputs, is_paired=matrix.is_paired)]
            if is_tuned and rows in TUNED_ROWS:
                tiles += tiles_to_try(rows)
            times = dict[Tile, float]()
            for tile in tiles if part is None else tiles[part::PARTS]:
                try:
                    times[tile] = microseconds(_call(matrix, rows, tile), weights)
                except Exception as error:
                    yield f"| {matrix.name} | {rows} | {tile} | failed: {error!r:.100} |"
            fastest = sorted(times, key=times.__getitem__)
            for tile in fastest[:3]:
                us, floor = times[tile], matrix.nbytes / BANDWIDTH * 1e6
                yield f"| {matrix.name} | {rows} | {tile} | {us:.1f} | {floor:.1f} | {floor / us:.2f} |"
            if is_tuned and rows in TUNED_ROWS and fastest:
                key = four_bit_key(RowClass.of(rows), outputs, inputs, matrix.is_paired)
                best[key] = list(astuple(fastest[0]))
    if is_tuned:
        yield json.dumps(best)


def tiles_to_try(rows: int) -> list[Tile]:
    is_one = rows == 1
    return [
        Tile(n, k, warps, stages, splits=splits)
        for n, warps in (((16, 1), (32, 1), (32, 2), (64, 4)) if is_one else ((64, 4), (128, 4), (128, 8)))
        for k in ((128, 256) if is_one else (128,))
        for stages in ((3, 4, 6) if is_one else (3, 4))
        for splits in (1, 2, 4, 8)
    ]


def _call(matrix: Matrix, rows: int, tile: Tile) -> Callable[[FourBitWeight], object]:
    from paceline.kernels.gpu.linear import Normed, gate_up, linear

    x = torch.randn(rows, matrix.inputs, device="cuda", dtype=torch.bfloat16)
    if not matrix.is_paired:
        return partial(linear, x, tile=tile)
    return partial(gate_up, Normed(x, torch.ones(rows, 64, device="cuda"), 1e-5), tile=tile)


def microseconds(call: Callable[[FourBitWeight], object], weights: list[FourBitWeight]) -> float:
    """Time of one call, of a graph of calls with different weights."""
    call(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    return 1e6 * replay_seconds(graph) / len(weights)
