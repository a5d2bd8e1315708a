"""Times the linear kernels with cold weights, and finds the best tile for each matrix and number of rows.

python benchmarks/tune_linear.py            # a table: matrix, rows, tile, microseconds, share of the bandwidth
"""

import argparse
import itertools
import json
import multiprocessing
from dataclasses import astuple, dataclass, replace

import torch
from gpu_runs import replay_seconds

from paceline.kernels.gpu.linear import Normed, add_linear, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.tiles import MEASURED, Tile, tile_key
from paceline.kernels.linear import DenseWeight, LinearWeight, QuantizedWeight

BANDWIDTH = 4.3e12
COLD_BYTES = 400_000_000  # several times the L2 cache
COMPILERS = 12


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # linear, gate_up, qkv
    outputs: int
    inputs: int
    dtype: torch.dtype
    rows: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def nbytes(self) -> int:
        return self.outputs * self.inputs * self.dtype.itemsize


def shapes(name: str, dtype: torch.dtype, rows: int) -> list[Case]:
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


def tiles(case: Case) -> list[Tile]:
    wide = 2 // case.dtype.itemsize  # 8-bit tiles have the same width in bytes
    if case.inputs <= 2048 and case.rows > 16:
        # Every strip reads all rows again, so the head needs wide strips.
        strips = ((64, 4), (128, 4), (128, 8)) if case.kind == "head" else ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4))
        grid = itertools.product(strips, (64, 128, 256), (3, 5))
    elif case.inputs <= 2048:
        grid = itertools.product(((16, 1), (16, 2), (32, 2)), (128, 256), (3, 5))
    elif case.rows > 16:
        grid = itertools.product(((32, 4), (64, 4), (128, 4)), (64 * wide, 128 * wide), (3, 4, 6))
    else:
        grid = itertools.product(((16, 1), (16, 2), (32, 2), (64, 4)), (256 * wide, 512 * wide), (3, 4, 6))
    found = [Tile(outputs, inputs, warps, stages) for (outputs, warps), inputs, stages in grid]
    if case.kind == "linear" and case.rows > 16:  # too few programs otherwise
        found += [replace(tile, splits=splits) for tile in found for splits in (2, 4)]
    return found


def weight_of(case: Case) -> LinearWeight:
    values = torch.randn(case.outputs, case.inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    if case.dtype is torch.bfloat16:
        return DenseWeight(values)
    scales = torch.full((case.outputs, 1), 0.01, device="cuda")
    return QuantizedWeight((values * 100).to(case.dtype), scales)


class Chain:
    """Calls of one case with different weights, as one CUDA graph."""

    def __init__(self, case: Case, copies: int) -> None:
        self.case = case
        self.weights = [weight_of(case) for _ in range(copies)]
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(case.rows, case.inputs, **bf16)
        self.normed = Normed(self.x, torch.ones(case.rows, 128, device="cuda"), 1e-5)
        self.residual = torch.zeros(case.rows, case.outputs, **bf16)
        self.norm = torch.ones(case.outputs, **bf16)
        if case.kind == "qkv":
            self.table = torch.randn(1024, case.head_dim // 2, device="cuda")
            self.positions = torch.arange(case.rows, device="cuda")
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


def compile_some(case: Case, some: list[Tile]) -> None:
    chain = Chain(case, 1)
    for tile in some:
        try:
            chain.call(chain.weights[0], tile)
        except Exception as error:
            print(case.name, tile, type(error).__name__, str(error)[:80], flush=True)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["8b", "70b", "135m"], help="8b, 70b, 135m; all by default")
    names = parser.parse_args().models
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    plan = {"8b": [(bf16, 1), (bf16, 64)], "70b": [(fp8, 1), (fp8, 64)], "135m": [(bf16, 1), (bf16, 64)]}
    cases = [case for name in names for dtype, rows in plan[name] for case in shapes(name, dtype, rows)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(COMPILERS) as pool:
        shares = [(case, tiles(case)[i::4]) for case in cases for i in range(4)]
        pool.starmap(compile_some, shares, chunksize=1)
    best = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    for case in cases:
        chain = Chain(case, max(2, min(24, COLD_BYTES // case.nbytes + 1)))
        results = []
        for tile in tiles(case):
            try:
                results.append((chain.microseconds(tile), tile))
            except Exception as error:
                print(case.name, tile, type(error).__name__)
        results.sort(key=lambda pair: pair[0])
        floor = case.nbytes / BANDWIDTH * 1e6
        is_paired = case.kind in ("qkv", "gate_up")
        key = tile_key(case.rows <= 16, case.outputs, case.inputs, case.dtype.itemsize, is_paired)
        best[key] = list(astuple(results[0][1]))
        MEASURED.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n")
        for micros, tile in results[:2]:
            name = f"{case.name} {str(case.dtype)[6:]}, {case.rows} rows"
            print(f"{name:32} {micros:8.2f} us, {floor / micros:.2f} of floor: {tile}", flush=True)
        del chain
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
