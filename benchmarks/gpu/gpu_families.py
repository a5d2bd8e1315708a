"""4-bit weights and routed experts on one GPU: plain and speculative decoding next to the memory floor, and logits of families.

    python benchmarks/gpu/gpu_families.py                        # all sections, about 100 s on an H200
    python benchmarks/gpu/gpu_families.py --only kernels --tune  # times tiles of 4-bit matrices and prints the best as JSON

Weights are random and made on the device. The layers after the first two add little to the residual stream (--noise), so that a
draft of the first two layers often agrees with the whole model. Kernels are compiled first, by one process for each section.

Floor: the time to read the weights of a step once at the speed of a large copy. Of experts, those that a batch is expected to
use count, if routing is uniform.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median
from subprocess import DEVNULL, Popen

import torch
from gpu_families_models import PARTS, SHAPES, RandomModel, random_four_bit
from gpu_runs import BANDWIDTH, Run, decode, replay_seconds, switch
from tests.specs import changed

from paceline.core.clock import WallClock
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.start.build import engine_of_parts
from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.weights import Dense, FourBit, Weight
from paceline.kernels.gpu.tiles import RowClass, Tile, four_bit_key, four_bit_tile
from paceline.kv.block_tables import BlockTables
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.flat import flat_spec
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner.runner import ModelRunner, Span
from paceline.models.weights.checkpoint import Float32Activations
from paceline.models.weights.family_weights import unpack_mxfp4
from paceline.policy.depth.breaker import Breaker, BreakerRule
from paceline.policy.depth.rules import FixedDepth
from paceline.requests.validator import Limits, RequestValidator

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
    from paceline.kernels.gpu.linear import gate_up, linear
    from paceline.kernels.gpu.normed import Normed

    x = torch.randn(rows, matrix.inputs, device="cuda", dtype=torch.bfloat16)
    if not matrix.is_paired:
        return partial(linear, x, tile=tile)
    return partial(gate_up, Normed(x, torch.full((rows, 64), 2**24, device="cuda"), 1e-5), tile=tile)


def microseconds(call: Callable[[FourBitWeight], object], weights: list[FourBitWeight]) -> float:
    """Time of one call, of a graph of calls with different weights."""
    call(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    return 1e6 * replay_seconds(graph) / len(weights)


TINY = flat_spec(
    "llama", vocab_size=160, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128,
    rms_eps=1e-6, rope_theta=10000.0, max_position=512,
)  # fmt: skip
EXPERTS = changed(TINY, ffn_size=64, num_experts=8, experts_per_token=3)
GPT_OSS = changed(
    EXPERTS, architecture="gpt_oss", attention_bias=True, output_bias=True, has_sinks=True, sliding_window=7,
    full_layers=(1,), activation="clamped_swiglu",
)  # fmt: skip
GEMMA = changed(
    TINY, architecture="gemma3_text", sliding_window=7, full_layers=(1,), qk_norm=True, local_rope_theta=1000.0,
    attention_scale=0.3, has_output_norms=True, embedding_scale=11.0, activation="gelu_tanh", tie_embeddings=True,
)  # fmt: skip
FAMILIES: dict[str, tuple[DecoderSpec, str]] = {
    "llama": (TINY, "dense"),
    "llama, 4-bit groups of 128": (TINY, "float16 128"),
    "llama, 4-bit groups of 32": (TINY, "bfloat16 32"),
    "qwen2": (changed(TINY, attention_bias=True), "dense"),
    "qwen3": (changed(TINY, qk_norm=True), "dense"),
    "qwen3_moe": (changed(EXPERTS, architecture="qwen3_moe", qk_norm=True), "dense"),
    "qwen3_moe, 4-bit": (changed(EXPERTS, architecture="qwen3_moe", qk_norm=True, ffn_size=128), "float16 128"),
    "gemma3_text": (GEMMA, "dense"),
    "gpt_oss": (GPT_OSS, "dense"),
    "gpt_oss, MXFP4": (GPT_OSS, "mxfp4"),
}


class TinyWeights:
    """Random weights on the host, equal for equal names."""

    def __init__(self, config: DecoderSpec, form: str) -> None:
        self._config, self._form = config, form

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str) -> Weight:
        outputs, inputs = self._config.weight_shape(name)
        draw = self._draw(name)
        is_coded = name.startswith("model.layers.") and not name.endswith(".mlp.gate.weight")
        if not is_coded or self._form == "dense" or (self._form == "mxfp4" and ".experts." not in name):
            return Dense(torch.randn(outputs, inputs, generator=draw) * 0.1)
        if self._form == "mxfp4":
            blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
            return unpack_mxfp4(
                blocks, torch.randint(121, 124, (outputs, inputs // 32), generator=draw, dtype=torch.uint8)
            )
        kind, group = self._form.split()[0], min(int(self._form.split()[1]), inputs)
        dtype = torch.float16 if kind == "float16" else torch.bfloat16
        codes = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
        scales = (0.02 + 0.01 * torch.rand(outputs, inputs // group, generator=draw)).to(dtype).float()
        zeros = torch.randint(6, 11, scales.shape, generator=draw).float()
        fine, offsets = (values.repeat_interleave(group // 32, 1) for values in (scales, -zeros * scales))
        return FourBit(codes, fine, offsets, 32, stored_group=group, scale_dtype=dtype)

    def vector(self, name: str) -> torch.Tensor:
        drawn = 0.3 * torch.randn(self._config.weight_shape(name), generator=self._draw(name))
        return drawn if name.endswith(("bias", "sinks")) else 1 + drawn

    def _draw(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(sum(byte * (i + 1) for i, byte in enumerate(name.encode())))


def logits_of(model: DecoderModel, make: Callable[[DecoderModel, int], ModelRunner], prompt: int) -> torch.Tensor:
    """Logits of a prompt, of a decoded token, and of a verification of five."""
    runner, ids = make(model, 16), [(7 * i + 3) % TINY.vocab_size for i in range(prompt + 6)]
    blocks = [3, 1, 4, 2, 5, 9, 8]
    parts = (0, prompt, 3), (prompt, prompt + 1, 1), (prompt + 1, prompt + 6, 5)
    found = []
    for begin, end, count in parts:
        logits = runner.forward([Span(blocks, begin, ids[begin:end], count)]).logits
        assert logits is not None
        found.append(logits.float().cpu().clone())  # the next pass overwrites them
    return torch.cat(found)


def family_lines(device: torch.device, part: int | None) -> Iterator[str]:
    """One line of the table for each family; of every eighth, with a part."""
    from paceline.models.runner.gpu.runner import GpuRunner

    yield "| family | float32: largest difference | bfloat16: largest difference | largest logit |"
    chosen = list(FAMILIES.items())
    for name, (config, form) in chosen if part is None else chosen[part::PARTS]:
        try:
            weights = TinyWeights(config, form)
            reference = DecoderModel(config, Float32Activations(weights), torch.device("cpu"), torch.float32)
            found = []
            for dtype, prompt in ((torch.float32, 16), (torch.bfloat16, 100)):  # float32 takes long to compile
                expected = logits_of(reference, ModelRunner, prompt)
                ours = logits_of(DecoderModel(config, weights, device, dtype), GpuRunner, prompt)
                found.append(float((ours - expected).abs().max()))
            yield f"| {name} | {found[0]:.1e} | {found[1]:.1e} | {float(expected.abs().max()):.2f} |"
        except Exception as error:
            traceback.print_exc()
            yield f"| {name} | failed: {error!r:.200} |"


DEVICE = torch.device("cuda")
HEADER = (
    "| shape | batch | plain, ms/step | on the device | floor | share | speculative, ms per token of each | "
    "speed-up | alpha | tokens/round | same text |"
)


def make_engine(random: RandomModel, batch: int, depth: int) -> Engine:
    from paceline.engine.graph.executor import GraphExecutor
    from paceline.models.runner.gpu.runner import GpuRunner
    from paceline.speculation.proposers.model.draft_model import DraftModelProposer

    clock, blocks, most, size = WallClock(), 64 * (batch + 1), 64, random.model.config.vocab_size
    tables = BlockTables(blocks, prefix_caching=False)
    runner = GpuRunner(random.model, blocks)
    proposer = DraftModelProposer(GpuRunner(random.draft, blocks), most, size, size, prefix_caching=False)
    proposers = {"draft_model": proposer}
    validator = RequestValidator(Limits(size, 1024, max_depth=depth), "coupled", "draft_model", proposers, None)
    breaker, methods = Breaker(BreakerRule(threshold=0.0)), frozenset(proposers)
    speculator = Speculator(
        proposers, FixedDepth(depth), breaker, validator, clock, size, enabled=True, graph_methods=methods
    )
    scheduler = Scheduler(tables, batch, most)
    graph = GraphExecutor(runner, proposer, scheduler, speculator, validator, depth, clock)
    return engine_of_parts(runner, scheduler, speculator, validator, tokenizer=None, clock=clock, graph=graph)


def decoding_lines(name: str, options: argparse.Namespace) -> Iterator[str]:
    """One line of the table for each batch size."""
    started = time.perf_counter()
    random = RandomModel(SHAPES[name], options.layers, options.noise, DEVICE)
    torch.cuda.synchronize()
    made = time.perf_counter() - started
    yield f"{name}: weights of the layers {random.model.weight_bytes / 1e9:.1f} GB, made in {made:.1f} s"
    yield HEADER
    for batch in options.batches:
        engine = make_engine(random, batch, options.depth)
        tokens = torch.randint(
            0, random.model.config.vocab_size, (batch, 8), generator=torch.Generator().manual_seed(1)
        )
        prompts = tokens.tolist()
        results: dict[bool, list[Run]] = {}
        for enabled in (False, True):
            switch(engine, enabled, options.depth if enabled else None)
            decode(engine, prompts, 16)  # captures
            results[enabled] = [decode(engine, prompts, options.tokens) for _ in range(options.repeats)]
        yield f"| {name} {decoding_line(batch, 1e3 * random.floor_seconds(batch), results[False], results[True])}"
        del engine
        torch.cuda.empty_cache()


def decoding_line(batch: int, floor: float, plain: list[Run], drafted: list[Run]) -> str:
    """Plain and speculative runs of one batch next to `floor`, the least milliseconds of a step."""
    step = median(1e3 * run.seconds / max(1, run.steps) for run in plain)
    on_device = median(1e3 * run.device_seconds / max(1, run.steps) for run in plain)
    paces = [median(1e3 * batch * run.seconds / max(1, run.tokens) for run in runs) for runs in (plain, drafted)]
    rounds = sum(run.rounds.total() for run in drafted)
    per_round = sum(run.tokens for run in drafted) / max(1, rounds)
    same = sum(plain[0].texts[request] == text for request, text in drafted[0].texts.items())
    return (
        f"| {batch} | {step:.3f} | {on_device:.3f} | {floor:.3f} | {floor / step:.2f} | {paces[1]:.3f} | "
        f"{paces[0] / max(paces[1], 1e-9):.2f}x | {drafted[0].alpha:.2f} | {per_round:.2f} | {same} of {batch} |"
    )


def sections(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[str]]]:
    return {
        "families": lambda: family_lines(DEVICE, options.part),
        "kernels": lambda: kernel_lines(options.tune, options.part),
        **{name: (lambda name=name: decoding_lines(name, options)) for name in SHAPES},
    }


def compile_all(chosen: list[str], tune: bool) -> None:
    """Run each section with few layers in a process of its own, so that the kernels are compiled in parallel."""
    started = time.perf_counter()
    tuning = [("--tune", "--part", str(part)) for part in range(PARTS)] if tune else [()]
    few = "--layers", "3", "--tokens", "6", "--repeats", "1", "--compiled"
    batches = {name: (("--batches", "1"), ("--batches", "8")) if name in SHAPES else [()] for name in chosen}
    batches |= {"kernels": tuning} if "kernels" in chosen else {}
    batches |= {"families": [("--part", str(part)) for part in range(PARTS)]} if "families" in chosen else {}
    processes = [
        Popen([sys.executable, __file__, "--only", name, *few, *batch], stdout=DEVNULL, stderr=DEVNULL)
        for name in chosen
        for batch in batches[name]
    ]
    for process in processes:
        process.wait()
    print(f"kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=["families", "kernels", *SHAPES], help="sections; default: all"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depth", type=int, default=3, help="drafted tokens")
    parser.add_argument("--noise", type=float, default=0.04, help="size of the layers that the draft lacks")
    parser.add_argument("--batches", type=int, action="append", help="batch sizes; default: 1 and 8")
    parser.add_argument("--layers", type=int, help="layers of the models; default: all")
    parser.add_argument("--tune", action="store_true", help="time many tiles of 4-bit matrices")
    parser.add_argument("--part", type=int, help="only every eighth family or tile, beginning with this one")
    parser.add_argument("--compiled", action="store_true", help="do not compile kernels in other processes first")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; tests/engine/graph/test_families.py checks the families without one")
    options.batches = options.batches or [1, 8]
    options.only = options.only or ["families", "kernels", *SHAPES]
    return options


def main() -> None:
    options = parse()
    if not options.compiled:
        compile_all(options.only, options.tune)
    began = time.perf_counter()
    lines = sections(options)
    for name in options.only:
        print(f"\n## {name}", flush=True)
        try:
            for line in lines[name]():
                print(line, flush=True)
        except Exception:
            traceback.print_exc()
            print(f"{name} failed", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
