"""Times the linear kernels with cold weights, and finds the best tile for each matrix and class of row counts.

python benchmarks/gpu/tune_linear.py                    # a table: matrix, rows, microseconds, share of the floor, tile
python benchmarks/gpu/tune_linear.py 70b --classes more --seconds 90
python benchmarks/gpu/tune_linear.py 70b --quick        # a few tiles only

Classes: up to 16 rows, 17 to 64, more than 64 (8-bit weights only). A tile is measured with two numbers of rows; the one with
the least time relative to the best counts, the smaller number twice. Results replace those in tiles.json, case by case.

Kernels are compiled first, in parallel, in at most 60% of the time; only tiles that are compiled by then are measured. For more
than 64 rows, a tile counts only if it agrees with the vendor's product. The script then prints the times of the vendor's
product with bf16 weights, and of a conversion to bf16 before it, both without scales.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_runs import BANDWIDTH, replay_seconds
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.kernels.gpu.linear import add_linear, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.tiles import MEASURED, RowClass, Tile, tile_for, tile_key

ROWS = {RowClass.UP_TO_16: (8, 16), RowClass.UP_TO_64: (32, 64), RowClass.MORE: (128, 1024)}
"""The two numbers of rows that a tile of a class is measured with."""
DTYPES = {"8b": torch.bfloat16, "70b": torch.float8_e4m3fn, "135m": torch.bfloat16}
SHAPES = {"8b": (4096, 32, 8, 128, 14336), "70b": (8192, 64, 8, 128, 28672), "135m": (576, 9, 3, 64, 1536)}
"""Width, heads, heads of keys and values, width of a head, width of the feed-forward layer."""
SHARED_BYTES = 227 * 1024
"""Most shared memory of a program on an H200."""
PROCESSORS = 132


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # product, add_linear, gate_up, qkv, head
    outputs: int
    inputs: int
    dtype: torch.dtype
    row_class: RowClass
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def nbytes(self) -> int:
        return self.outputs * self.inputs * self.dtype.itemsize

    @property
    def rows(self) -> tuple[int, int]:
        return ROWS[self.row_class]

    @property
    def is_paired(self) -> bool:
        return self.kind in ("qkv", "gate_up")

    @property
    def key(self) -> str:
        return tile_key(self.row_class, self.outputs, self.inputs, self.dtype.itemsize, self.is_paired)

    @property
    def before(self) -> Tile:
        """The tile that products use now."""
        return tile_for(self.rows[1], self.outputs, self.inputs, self.dtype.itemsize, self.is_paired)

    def kernel(self, rows: int, tile: Tile) -> tuple[object, ...]:
        """Equal for cases and numbers of rows that use the same compiled kernel."""
        outputs = self.outputs % tile.outputs == 0, self.outputs % 16 == 0
        return self.kind, self.inputs, self.dtype, tile.rows_of(rows), replace(tile, rows=0), outputs


@dataclass(frozen=True)
class Work:
    """Tiles whose kernels one call compiles."""

    case: Case
    rows: int
    tiles: tuple[Tile, ...]


def cases_of(models: Iterable[str], classes: Iterable[RowClass], is_quick: bool) -> list[Case]:
    """The most important matrices first. `is_quick`: without the head, a small part of a pass."""
    found = [case for name in models for row_class in classes for case in _shapes(name, row_class)]
    return [case for case in found if not (is_quick and case.kind == "head")]


def _shapes(name: str, row_class: RowClass) -> list[Case]:
    d, heads, kv, hd, ffn = SHAPES[name]
    dtype, qkv = DTYPES[name], (heads + 2 * kv) * hd
    if row_class is RowClass.MORE:
        if dtype.itemsize > 1:
            return []
        shapes = {"gate_up": (2 * ffn, d), "down": (d, ffn), "qkv": (qkv, d), "o": (d, heads * hd)}
        return [Case(f"{name} {part}", "product", *shape, dtype, row_class) for part, shape in shapes.items()]
    return [
        Case(f"{name} gate_up", "gate_up", 2 * ffn, d, dtype, row_class),
        Case(f"{name} down", "add_linear", d, ffn, dtype, row_class),
        Case(f"{name} qkv", "qkv", qkv, d, dtype, row_class, heads, kv, hd),
        Case(f"{name} o", "add_linear", d, heads * hd, dtype, row_class),
        Case(f"{name} head", "head", 49152, d, torch.bfloat16, row_class),
    ]


def tiles_of(case: Case, is_quick: bool) -> list[Tile]:
    """The tile of now first, then those to try."""
    if case.row_class is RowClass.MORE:
        found = _more(case, is_quick)
    elif case.row_class is RowClass.UP_TO_64:
        found = _up_to_64(case, is_quick)
    else:
        found = _up_to_16(case, is_quick)
    return list(dict.fromkeys([case.before, *found]))


def _up_to_16(case: Case, is_quick: bool) -> list[Tile]:
    wide = 2 // case.dtype.itemsize  # 8-bit tiles have the same width in bytes
    if case.inputs <= 2048:
        return _grid(((16, 1), (16, 2), (32, 2)), (128, 256), (3, 5))
    if is_quick:
        return _grid(((16, 1), (32, 2), (64, 4)), (128 * wide, 256 * wide), (3, 4))
    return _grid(((16, 1), (16, 2), (32, 2), (64, 4)), (256 * wide, 512 * wide), (3, 4, 6))


def _up_to_64(case: Case, is_quick: bool) -> list[Tile]:
    wide, narrow = 2 // case.dtype.itemsize, list[Tile]()
    if case.inputs <= 2048:
        # Every strip reads all rows again, so the head needs wide strips.
        strips = ((64, 4), (128, 4), (128, 8)) if case.kind == "head" else ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4))
        found = _grid(strips, (64, 128, 256), (3, 5))
    elif is_quick:
        found = _grid(((64, 4), (128, 4), (128, 8)), (64 * wide, 128 * wide), (3, 4))
    else:
        found = _grid(((32, 4), (64, 4), (128, 4)), (64 * wide, 128 * wide), (3, 4, 6))
        narrow = _grid(((16, 1), (16, 2), (32, 1), (32, 2)), (128, 256), (3, 4, 5))
    # Too few programs otherwise. Products of dense weights have one part at any number of rows
    if case.kind == "add_linear" and case.dtype.itemsize == 1:
        found += [replace(tile, splits=splits) for tile in found for splits in ((2,) if is_quick else (2, 4))]
    return [tile for tile in [*narrow, *found] if fits(tile, case.rows[1], case.dtype.itemsize)]


def _more(case: Case, is_quick: bool) -> list[Tile]:
    strips = tuple(itertools.product((64, 128, 256), (8,) if is_quick else (4, 8)))
    grid = _grid(strips, (64, 128), (3,) if is_quick else (3, 4))
    found = [replace(tile, rows=rows) for rows in (64, 128, 256) for tile in grid]
    found = [tile for tile in found if fits(tile, case.rows[0], case.dtype.itemsize)]
    return [replace(tile, splits=splits) for tile in found for splits in _splits(case, tile)]


def _splits(case: Case, tile: Tile) -> tuple[int, ...]:
    """More than one where the smaller number of rows gives fewer than two programs to each processor."""
    programs = -(-case.outputs // tile.outputs) * -(-case.rows[0] // tile.rows)
    return tuple(splits for splits in (1, 2, 4) if splits == 1 or programs * splits < 2 * PROCESSORS)


def _grid(strips: Sequence[tuple[int, int]], inputs: Sequence[int], stages: Sequence[int]) -> list[Tile]:
    """`strips`: (outputs, warps)."""
    return [
        Tile(outputs, width, warps, deep) for (outputs, warps), width, deep in itertools.product(strips, inputs, stages)
    ]


def fits(tile: Tile, rows: int, itemsize: int) -> bool:
    """Whether shared memory holds the stages of a tile, and registers its sums and weights."""
    threads = 32 * tile.warps
    sums, weights = tile.outputs * tile.rows_of(rows) // threads, tile.outputs * tile.inputs // threads
    return shared_bytes(tile, rows, itemsize) <= SHARED_BYTES and sums <= 128 and sums + weights <= 256


def shared_bytes(tile: Tile, rows: int, itemsize: int) -> int:
    """As Triton 3.7 allocates it. Products of 64 outputs and four warps read x, and dense weights, from shared memory while the
    next stages are loaded; others copy both to registers first."""
    is_shared = tile.warps >= 4 and tile.outputs >= 64
    copies = tile.stages if is_shared else tile.stages - 1
    weights = copies if itemsize > 1 else tile.stages - 1
    return tile.inputs * (copies * tile.rows_of(rows) * 2 + weights * tile.outputs * itemsize)


def work_of(cases: Iterable[Case], is_quick: bool, size: int = 4) -> list[Work]:
    """Every kernel of the cases once, in their order."""
    known, found = set[tuple[object, ...]](), list[Work]()
    for case in cases:
        for rows in case.rows:
            fresh = [tile for tile in tiles_of(case, is_quick) if case.kernel(rows, tile) not in known]
            known |= {case.kernel(rows, tile) for tile in fresh}
            found += [Work(case, rows, tuple(fresh[i : i + size])) for i in range(0, len(fresh), size)]
    return found


DEVICE = "cuda"
COLD_BYTES = 400_000_000  # several times the L2 cache
WEIGHTS = (2.0, 1.0)
"""Weights of the two numbers of rows of a case."""
CLASSES = {"16": RowClass.UP_TO_16, "64": RowClass.UP_TO_64, "more": RowClass.MORE}
COMPILING = 0.6
"""Share of the time in which kernels are compiled."""


def weight_of(case: Case) -> LinearWeight:
    values = torch.randn(case.outputs, case.inputs, device=DEVICE, dtype=torch.bfloat16) * 0.02
    if case.dtype is torch.bfloat16:
        return DenseWeight(values)
    scales = torch.full((case.outputs, 1), 0.01, device=DEVICE)
    return QuantizedWeight((values * 100).to(case.dtype), scales)


def microseconds(call: Callable[[Any], object], arguments: list[Any], calls: int) -> float:
    """Time of one call, of a graph of about `calls` calls with different arguments."""
    call(arguments[0])
    graph, repeats = torch.cuda.CUDAGraph(), max(1, calls // len(arguments))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for argument in arguments:
                call(argument)
    return 1e6 * replay_seconds(graph) / (repeats * len(arguments))


class Chain:
    """Calls of one case with different weights."""

    def __init__(self, case: Case, rows: int, weights: list[LinearWeight]) -> None:
        self.case, self.weights = case, weights
        self.calls = 24 if rows <= 64 else 6
        bf16 = {"device": DEVICE, "dtype": torch.bfloat16}
        self.x = torch.randn(rows, case.inputs, **bf16)
        self.normed = Normed(self.x, torch.full((rows, 128), 2**24, device=DEVICE), 1e-5)
        self.residual = torch.zeros(rows, case.outputs, **bf16)
        self.norm = torch.ones(case.outputs, **bf16)
        if case.kind == "qkv":
            self.table = torch.randn(1024, case.head_dim // 2, device=DEVICE)
            self.positions = torch.arange(rows, device=DEVICE)
            self.cache = torch.zeros(64, 16, case.kv_heads, case.head_dim, **bf16)

    def call(self, weight: LinearWeight, tile: Tile) -> Tensor:
        case = self.case
        if case.kind == "gate_up":
            return gate_up(self.normed, weight, tile)
        if case.kind == "qkv":
            places = (self.table, self.table, self.positions, self.positions, self.cache, self.cache)
            return qkv_rotary_store(self.normed, weight, None, *places, case.heads, tile)
        if case.kind == "head":
            return linear(self.x, weight, out_dtype=torch.float32, tile=tile)
        if case.kind == "product":
            return linear(self.x, weight, tile=tile)
        return add_linear(self.x, weight, self.residual, self.norm, 1e-5, tile)[0]

    def microseconds(self, tile: Tile) -> float:
        return microseconds(partial(self.call, tile=tile), self.weights, self.calls)

    def is_right(self, tile: Tile) -> bool:
        """Whether the product agrees with the vendor's."""
        weight = self.weights[0]
        if self.case.kind != "product" or not isinstance(weight, QuantizedWeight):
            return True
        expected = dense_linear(self.x, weight.values.to(self.x.dtype)).float() * weight.scales.t()
        return torch.allclose(self.call(weight, tile).float(), expected, rtol=0.02, atol=0.02 * float(expected.std()))

    def vendor_microseconds(self) -> tuple[float, float]:
        """(product with bf16 weights, conversion of 8-bit weights and product)."""
        codes = [weight.values for weight in self.weights if isinstance(weight, QuantizedWeight)]
        converting = microseconds(lambda weight: dense_linear(self.x, weight.to(self.x.dtype)), codes, self.calls)
        dense = [matrix.to(self.x.dtype) for matrix in codes]
        return microseconds(lambda weight: dense_linear(self.x, weight), dense, self.calls), converting


def compile_some(work: Work) -> set[tuple[object, ...]]:
    """The kernels that could be compiled."""
    case, found = work.case, set()
    chain = Chain(case, work.rows, [weight_of(case)])
    for tile in work.tiles:
        try:
            chain.call(chain.weights[0], tile)
            found.add(case.kernel(work.rows, tile))
        except Exception as error:
            print(case.name, tile, type(error).__name__, str(error)[:80], flush=True)
    torch.cuda.synchronize()
    return found


def compile_all(tasks: list[Work], seconds: float) -> set[tuple[object, ...]]:
    """The kernels that are compiled after `seconds`, by one process for each core."""
    began, found = time.perf_counter(), set[tuple[object, ...]]()
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        results = pool.imap_unordered(compile_some, tasks)
        for _ in tasks:
            try:
                found |= results.next(max(0.0, seconds - (time.perf_counter() - began)))
            except multiprocessing.TimeoutError:
                print("no time left to compile the other kernels", flush=True)
                break
            except Exception as error:
                print(f"not compiled: {error!r:.100}", flush=True)
    print(f"compiled {len(found)} kernels in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def measure(chains: list[Chain], candidates: list[Tile], deadline: float) -> list[tuple[Tile, list[float]]]:
    """Microseconds of every tile that runs with both numbers of rows."""
    found = []
    for i, tile in enumerate(candidates):
        if time.perf_counter() > deadline:
            print(
                f"{chains[0].case.name}: no time left for {len(candidates) - i} of {len(candidates)} tiles", flush=True
            )
            break
        try:
            if all(chain.is_right(tile) for chain in chains):
                found.append((tile, [chain.microseconds(tile) for chain in chains]))
            else:
                print(chains[0].case.name, tile, "WRONG RESULT", flush=True)
        except Exception as error:
            print(chains[0].case.name, tile, type(error).__name__, flush=True)
    return found


def ranked(found: list[tuple[Tile, list[float]]]) -> list[tuple[Tile, list[float]]]:
    """Best first: by time relative to the best at each number of rows."""
    if not found:
        return []
    best = [min(times) for times in zip(*[times for _, times in found], strict=True)]

    def cost(times: list[float]) -> float:
        return sum(weight * time / least for weight, time, least in zip(WEIGHTS, times, best, strict=True))

    return sorted(found, key=lambda pair: cost(pair[1]))


def tune(case: Case, candidates: list[Tile], deadline: float) -> Tile | None:
    """The best tile; None without a result. Prints the two best and the tile of now."""
    weights = [weight_of(case) for _ in range(max(2, min(24, COLD_BYTES // case.nbytes + 1)))]
    chains = [Chain(case, rows, weights) for rows in case.rows]
    results = ranked(measure(chains, candidates, deadline))
    for tile, times in [*results[:2], *[pair for pair in results[2:] if pair[0] == case.before]]:
        show(case, times, f"{tile}{' (before)' if tile == case.before else ''}")
    if results and case.row_class is RowClass.MORE:
        vendor, converting = zip(*[chain.vendor_microseconds() for chain in chains], strict=True)
        show(case, vendor, "the vendor's product, bf16 weights")
        show(case, converting, "conversion to bf16, then the vendor's product")
    return results[0][0] if results else None


def show(case: Case, times: list[float] | tuple[float, ...], label: str) -> None:
    def one(rows: int, micros: float) -> str:
        if case.row_class is RowClass.MORE:
            return f"{rows} rows {micros:.1f} us ({2e-6 * rows * case.outputs * case.inputs / micros:.0f} TFLOP/s)"
        return f"{rows} rows {micros:.1f} us ({1e6 * case.nbytes / BANDWIDTH / micros:.2f} of floor)"

    shown = ", ".join(one(rows, micros) for rows, micros in zip(case.rows, times, strict=True))
    print(f"{f'{case.name} {str(case.dtype)[6:]}':24} {shown}: {label}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(DTYPES), help="8b, 70b, 135m; all by default")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES), help="most rows of the classes")
    parser.add_argument("--quick", action="store_true", help="try fewer tiles, and leave out the head")
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which no other tile is measured")
    parser.add_argument("--out", type=Path, help="a copy of tiles.json")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    cases = cases_of(options.models, [CLASSES[name] for name in options.classes], options.quick)
    if not cases:
        parser.error("dense products of more than 64 rows have no tiles; name a model with 8-bit weights: 70b")
    kernels = compile_all(work_of(cases, options.quick), COMPILING * options.seconds)
    best = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for case in cases:
        candidates = [
            tile
            for tile in tiles_of(case, options.quick)
            if all(case.kernel(rows, tile) in kernels for rows in case.rows)
        ]
        tile = tune(case, candidates, deadline) if candidates else None
        if tile is None:
            print(f"{case.name}, {case.row_class}: not measured", flush=True)
            continue
        best[case.key] = list(astuple(tile))
        MEASURED.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n")
        if options.out is not None:
            options.out.write_text(MEASURED.read_text())
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
