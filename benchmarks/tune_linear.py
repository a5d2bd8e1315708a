"""Times the linear kernels with cold weights, and finds the best tile for each matrix and number of rows.

python benchmarks/tune_linear.py                    # a table: matrix, rows, tile, microseconds, share of the bandwidth
python benchmarks/tune_linear.py 70b --quick        # a few tiles only, within a minute

All numbers of rows up to 16 share one tile, and so do all larger ones. A tile is measured with two numbers of rows; the one
with the least time relative to the best counts, the smaller number twice. Results replace those in tiles.json, case by case.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from gpu_runs import replay_seconds

from paceline.kernels.gpu.linear import Normed, add_linear, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.tiles import MEASURED, Tile, tile_key
from paceline.kernels.linear import DenseWeight, LinearWeight, QuantizedWeight

BANDWIDTH = 4.3e12
COLD_BYTES = 400_000_000  # several times the L2 cache
COMPILERS = 12
WEIGHTS = (2.0, 1.0)
"""Weights of the two numbers of rows of a case."""


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # linear, gate_up, qkv
    outputs: int
    inputs: int
    dtype: torch.dtype
    rows: tuple[int, int]
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def nbytes(self) -> int:
        return self.outputs * self.inputs * self.dtype.itemsize

    @property
    def is_few(self) -> bool:
        return max(self.rows) <= 16


def shapes(name: str, dtype: torch.dtype, rows: tuple[int, int]) -> list[Case]:
    d, heads, kv, hd, ffn = {
        "8b": (4096, 32, 8, 128, 14336), "70b": (8192, 64, 8, 128, 28672), "135m": (576, 9, 3, 64, 1536)
    }[name]  # fmt: skip
    return [
        Case(f"{name} qkv", "qkv", (heads + 2 * kv) * hd, d, dtype, rows, heads, kv, hd),
        Case(f"{name} o", "linear", d, heads * hd, dtype, rows),
        Case(f"{name} gate_up", "gate_up", 2 * ffn, d, dtype, rows),
        Case(f"{name} down", "linear", d, ffn, dtype, rows),
        Case(f"{name} head", "head", 49152, d, torch.bfloat16, rows),
    ]


def tiles(case: Case, is_quick: bool) -> list[Tile]:
    wide = 2 // case.dtype.itemsize  # 8-bit tiles have the same width in bytes
    if case.inputs <= 2048 and not case.is_few:
        # Every strip reads all rows again, so the head needs wide strips.
        strips = ((64, 4), (128, 4), (128, 8)) if case.kind == "head" else ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4))
        grid = itertools.product(strips, (64, 128, 256), (3, 5))
    elif case.inputs <= 2048:
        grid = itertools.product(((16, 1), (16, 2), (32, 2)), (128, 256), (3, 5))
    elif not case.is_few and is_quick:
        grid = itertools.product(((64, 4), (128, 4), (128, 8)), (64 * wide, 128 * wide), (3, 4))
    elif not case.is_few:
        grid = itertools.product(((32, 4), (64, 4), (128, 4)), (64 * wide, 128 * wide), (3, 4, 6))
    elif is_quick:
        grid = itertools.product(((16, 1), (32, 2), (64, 4)), (128 * wide, 256 * wide), (3, 4))
    else:
        grid = itertools.product(((16, 1), (16, 2), (32, 2), (64, 4)), (256 * wide, 512 * wide), (3, 4, 6))
    found = [Tile(outputs, inputs, warps, stages) for (outputs, warps), inputs, stages in grid]
    if case.kind == "linear" and not case.is_few:  # too few programs otherwise
        found += [replace(tile, splits=splits) for tile in found for splits in ((2,) if is_quick else (2, 4))]
    return found


def weight_of(case: Case) -> LinearWeight:
    values = torch.randn(case.outputs, case.inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    if case.dtype is torch.bfloat16:
        return DenseWeight(values)
    scales = torch.full((case.outputs, 1), 0.01, device="cuda")
    return QuantizedWeight((values * 100).to(case.dtype), scales)


class Chain:
    """Calls of one case with different weights, as one CUDA graph."""

    def __init__(self, case: Case, rows: int, weights: list[LinearWeight]) -> None:
        self.case, self.weights = case, weights
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(rows, case.inputs, **bf16)
        self.normed = Normed(self.x, torch.ones(rows, 128, device="cuda"), 1e-5)
        self.residual = torch.zeros(rows, case.outputs, **bf16)
        self.norm = torch.ones(case.outputs, **bf16)
        if case.kind == "qkv":
            self.table = torch.randn(1024, case.head_dim // 2, device="cuda")
            self.positions = torch.arange(rows, device="cuda")
            self.cache = torch.zeros(64, 16, case.kv_heads, case.head_dim, **bf16)

    def call(self, weight: LinearWeight, tile: Tile) -> None:
        case = self.case
        if case.kind == "gate_up":
            gate_up(self.normed, weight, tile)
        elif case.kind == "qkv":
            places = (self.table, self.table, self.positions, self.positions, self.cache, self.cache)
            qkv_rotary_store(self.normed, weight, None, *places, case.heads, tile)
        elif case.kind == "head":
            linear(self.normed, weight, out_dtype=torch.float32, tile=tile)
        else:
            add_linear(self.x, weight, self.residual, self.norm, 1e-5, tile)

    def microseconds(self, tile: Tile) -> float:
        self.call(self.weights[0], tile)
        graph = torch.cuda.CUDAGraph()
        repeats = max(1, 24 // len(self.weights))
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for weight in self.weights:
                    self.call(weight, tile)
        return 1e6 * replay_seconds(graph) / (repeats * len(self.weights))


def compile_some(case: Case, rows: int, some: list[Tile]) -> None:
    chain = Chain(case, rows, [weight_of(case)])
    for tile in some:
        try:
            chain.call(chain.weights[0], tile)
        except Exception as error:
            print(case.name, tile, type(error).__name__, str(error)[:80], flush=True)
    torch.cuda.synchronize()


def measure(case: Case, candidates: list[Tile]) -> list[tuple[Tile, list[float]]]:
    """Microseconds of every tile that runs with both numbers of rows."""
    weights = [weight_of(case) for _ in range(max(2, min(24, COLD_BYTES // case.nbytes + 1)))]
    chains = [Chain(case, rows, weights) for rows in case.rows]
    found = []
    for tile in candidates:
        try:
            found.append((tile, [chain.microseconds(tile) for chain in chains]))
        except Exception as error:
            print(case.name, tile, type(error).__name__)
    return found


def ranked(found: list[tuple[Tile, list[float]]]) -> list[tuple[Tile, list[float]]]:
    """Best first: by time relative to the best at each number of rows."""
    if not found:
        return []
    best = [min(times) for times in zip(*[times for _, times in found], strict=True)]

    def cost(times: list[float]) -> float:
        return sum(weight * time / least for weight, time, least in zip(WEIGHTS, times, best, strict=True))

    return sorted(found, key=lambda pair: cost(pair[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["8b", "70b", "135m"], help="8b, 70b, 135m; all by default")
    parser.add_argument("--quick", action="store_true", help="try fewer tiles")
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which no other case is measured")
    parser.add_argument("--out", type=Path, help="a copy of tiles.json")
    options = parser.parse_args()
    began = time.perf_counter()
    few, many = (8, 16), (32, 128)
    dtypes = {"8b": torch.bfloat16, "70b": torch.float8_e4m3fn, "135m": torch.bfloat16}
    cases = [case for name in options.models for rows in (few, many) for case in shapes(name, dtypes[name], rows)]
    if options.quick:  # the head is a small part of a pass
        cases = [case for case in cases if case.kind != "head"]
    context = multiprocessing.get_context("spawn")
    with context.Pool(COMPILERS) as pool:
        shares = [
            (case, rows, tiles(case, options.quick)[i::2]) for case in cases for rows in case.rows for i in range(2)
        ]
        pool.starmap(compile_some, shares, chunksize=1)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    best = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for case in cases:
        if time.perf_counter() - began > options.seconds:
            print(f"{case.name}, {case.rows} rows: no time left", flush=True)
            continue
        is_paired = case.kind in ("qkv", "gate_up")
        key = tile_key(case.is_few, case.outputs, case.inputs, case.dtype.itemsize, is_paired)
        known, candidates = Tile(*best[key]) if key in best else None, tiles(case, options.quick)
        if known is not None and known not in candidates:
            candidates.append(known)
        results, floor = ranked(measure(case, candidates)), case.nbytes / BANDWIDTH * 1e6
        if not results:
            continue
        best[key] = list(astuple(results[0][0]))
        MEASURED.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n")
        if options.out is not None:
            options.out.write_text(MEASURED.read_text())
        for tile, times in [*results[:2], *[pair for pair in results[2:] if pair[0] == known]]:
            name = f"{case.name} {str(case.dtype)[6:]}"
            shown = ", ".join(
                f"{rows} rows {micros:.1f} us ({floor / micros:.2f} of floor)"
                for rows, micros in zip(case.rows, times, strict=True)
            )
            print(f"{name:24} {shown}: {tile}{' (before)' if tile == known else ''}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
