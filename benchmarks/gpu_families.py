"""4-bit weights and routed experts on one GPU: plain and speculative decoding beside the memory floor, and logits of families.

    python benchmarks/gpu_families.py                        # all sections, about 100 s on an H200
    python benchmarks/gpu_families.py --only kernels --tune  # times tiles of 4-bit matrices and prints the best as JSON

Weights are random and made on the device. The layers after the first two add little to the residual stream (--noise), so that a
draft of the first two layers often agrees with the whole model. Kernels are compiled first, by one process for each section.

Floor: the time to read the weights of a step once at the speed of a large copy. Of experts, those that a batch is expected to
use count, if routing is uniform.
"""

import argparse
import copy
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from subprocess import DEVNULL, Popen

import torch
from gpu_runs import replay_seconds

from gpu import BANDWIDTH, Run, decode, switch
from paceline.core.clock import WallClock
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import Limits, RequestValidator
from paceline.kernels.formats.four_bit import FourBitWeight, Kind
from paceline.kernels.linear import DenseWeight, LinearWeight
from paceline.kernels.weights import Dense, FourBit, Weight
from paceline.kv.block_tables import BlockTables
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.checkpoint import Float32Activations
from paceline.models.loading.formats.mxfp4 import unpack_mxfp4
from paceline.models.loading.streamed_weights import StreamedModel, StreamedWeights
from paceline.models.loading.weight_parts import Parts, Piece
from paceline.models.loading.weight_shapes import weight_shape
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from paceline.speculation.depth.simple_rules import FixedDepth

DRAFT_LAYERS = 2
TUNERS = 8
"""Processes that compile the kernels of families, or tiles."""
LLAMA_8B = ModelConfig(
    "llama", vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    rms_eps=1e-5, rope_theta=500000.0, max_position=2048,
)  # fmt: skip
QWEN3_30B = ModelConfig(
    "qwen3_moe", vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, ffn_size=768,
    rms_eps=1e-6, rope_theta=1e6, max_position=2048, qk_norm=True, num_experts=128, experts_per_token=8,
)  # fmt: skip
GPT_OSS_20B = ModelConfig(
    "gpt_oss", vocab_size=201088, hidden_size=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, ffn_size=2880,
    rms_eps=1e-5, rope_theta=150000.0, max_position=2048, attention_bias=True, output_bias=True, has_sinks=True,
    sliding_window=128, full_layers=tuple(range(1, 24, 2)), activation="clamped_swiglu", num_experts=32, experts_per_token=4,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    config: ModelConfig
    attention: Kind | None
    """4-bit format of the matrices of attention, and of one dense feed-forward layer; None: bfloat16."""
    experts: Kind | None = None


SHAPES = {
    "8b-4bit": Shape(LLAMA_8B, "float16"),
    "moe-bf16": Shape(QWEN3_30B, None),
    "moe-4bit": Shape(QWEN3_30B, "float16", "float16"),
    "gpt-oss": Shape(GPT_OSS_20B, None, "mxfp4"),
}


class RandomModel:
    """A model with random weights on the device, and a draft that shares its first layers."""

    def __init__(self, shape: Shape, layers: int | None, noise: float, device: torch.device) -> None:
        config = shape.config if layers is None else replace(shape.config, num_layers=layers)
        self._shape, self._config, self._noise, self._device = shape, config, noise, device
        self._generator = torch.Generator(device).manual_seed(0)
        streamed = StreamedWeights(Parts.of(config))
        streamed.put(streamed.parts.tokenizer, {})
        streamed.put(streamed.parts.tables, self._tables())
        total = 0
        for layer in range(config.num_layers):
            matrices = self._matrices(layer)
            total += sum(matrix.nbytes for matrix in matrices.values())
            streamed.put(streamed.parts.layer(layer), matrices)
        self.model = StreamedModel(config, device, torch.bfloat16, streamed, total)
        self.draft = copy.copy(self.model)
        count = min(DRAFT_LAYERS, config.num_layers)
        self.draft.config = replace(config, num_layers=count)
        self.draft.layers = self.model.layers[:count]
        self.draft.norms_after = [*self.model.norms_after[: count - 1], self.model.norms_after[-1]]

    def floor_seconds(self, rows: int) -> float:
        """Time to read the weights that a step over `rows` tokens needs."""
        config, total = self._config, self.model.head.nbytes
        for layer in self.model.layers:
            total += layer.qkv.nbytes + layer.output.nbytes
            inner = layer.gate_up.nbytes + layer.down.nbytes
            if config.num_experts:
                used = 1 - (1 - config.experts_per_token / config.num_experts) ** rows
                inner = int(inner * used) + layer.router.nbytes
            total += inner
        return total / BANDWIDTH

    def _tables(self) -> dict[str, Piece]:
        c, vectors = self._config, dict[str, Piece]()
        ones = {"input_norm": c.hidden_size, "post_attention_norm": c.hidden_size}
        ones |= {"q_norm": c.head_dim, "k_norm": c.head_dim} if c.qk_norm else {}
        drawn = {"qkv_bias": c.q_size + 2 * c.kv_size} if c.attention_bias else {}
        drawn |= {"sinks": c.num_heads} if c.has_sinks else {}
        if c.output_bias:
            drawn |= {"output_bias": c.hidden_size, "router_bias": c.num_experts}
            drawn |= {"gate_up_bias": 2 * c.ffn_size * c.num_experts, "down_bias": c.hidden_size * c.num_experts}
        for i in range(c.num_layers):
            vectors |= {f"layers.{i}.{name}": self._ones(size) for name, size in ones.items()}
            vectors |= {f"layers.{i}.{name}": self._randn(size) * 0.01 for name, size in drawn.items()}
        embedding, head = (DenseWeight(self._randn(c.vocab_size, c.hidden_size)) for _ in range(2))
        return {"embedding": embedding, "head": head, "final_norm": self._ones(c.hidden_size), **vectors}

    def _matrices(self, layer: int) -> dict[str, LinearWeight]:
        c, shape = self._config, self._shape
        size = self._noise if layer >= DRAFT_LAYERS else 1.0
        count, kind = (c.num_experts, shape.experts) if c.num_experts else (1, shape.attention)
        matrices = {
            "qkv": self._matrix(c.q_size + 2 * c.kv_size, c.hidden_size, shape.attention, 1.0),
            "output": self._matrix(c.hidden_size, c.q_size, shape.attention, size),
            "gate_up": self._matrix(count * 2 * c.ffn_size, c.hidden_size, kind, 1.0),
            "down": self._matrix(count * c.hidden_size, c.ffn_size, kind, size),
        }
        if c.num_experts:
            matrices["router"] = self._matrix(c.num_experts, c.hidden_size, None, 1.0)
        return matrices

    def _matrix(self, outputs: int, inputs: int, kind: Kind | None, size: float) -> LinearWeight:
        size *= inputs**-0.5
        if kind is None:
            return DenseWeight(self._randn(outputs, inputs) * size)
        return random_four_bit(outputs, inputs, kind, size, self._generator)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16)

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, device=self._device, dtype=torch.bfloat16)


def random_four_bit(outputs: int, inputs: int, kind: Kind, size: float, generator: torch.Generator) -> FourBitWeight:
    """Random codes, with scales so that values have the standard deviation `size`."""
    group, padded = (64 if kind == "mxfp4" else 128), -(-inputs // 128) * 128
    shape = outputs // 16, padded // group, 16, group // 2
    codes = torch.randint(0, 256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
    if kind == "mxfp4":  # the values of random codes have a deviation of 2.9
        exponent = round(torch.tensor(size / 2.9).log2().item()) + 127 + 126
        word = int.from_bytes(bytes([exponent] * 4), "little", signed=True)
    else:
        scale = torch.tensor(size / 4.6, dtype=torch.float16).view(torch.int16).item()
        word = int(torch.tensor(128.0 + 8.0, dtype=torch.bfloat16).view(torch.int16).item()) << 16 | int(scale) & 0xFFFF
    words = torch.full((padded // 128, outputs), word, dtype=torch.int32, device=generator.device)
    return FourBitWeight(codes, words, (outputs, inputs), group, kind)


def make_engine(random: RandomModel, batch: int, depth: int) -> Engine:
    from paceline.engine.executors.graph.executor import GraphExecutor
    from paceline.models.gpu.runner import GpuRunner
    from paceline.speculation.proposers.draft_model import DraftModelProposer

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
    return Engine(runner, scheduler, speculator, validator, tokenizer=None, clock=clock, graph=graph)


def decoding(name: str, options: argparse.Namespace) -> Iterator[str]:
    """One line of the table for each batch size."""
    started = time.perf_counter()
    device = torch.device(options.device)
    random = RandomModel(SHAPES[name], options.layers, options.noise, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    made = time.perf_counter() - started
    gigabytes = random.model.weight_bytes / 1e9
    yield f"{name}: weights of the layers {gigabytes:.1f} GB, made in {made:.1f} s"
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
        plain, drafted = results[False], results[True]
        step = median(1e3 * run.seconds / max(1, run.steps) for run in plain)
        on_device = median(1e3 * run.device_seconds / max(1, run.steps) for run in plain)
        floor = 1e3 * random.floor_seconds(batch)
        paces = [median(1e3 * batch * run.seconds / max(1, run.tokens) for run in runs) for runs in (plain, drafted)]
        rounds = sum(run.rounds.total() for run in drafted)
        per_round = sum(run.tokens for run in drafted) / max(1, rounds)
        same = sum(plain[0].texts[request] == text for request, text in drafted[0].texts.items())
        yield (
            f"| {name} | {batch} | {step:.3f} | {on_device:.3f} | {floor:.3f} | {floor / step:.2f} | {paces[1]:.3f} | "
            f"{paces[0] / max(paces[1], 1e-9):.2f}x | {drafted[0].alpha:.2f} | {per_round:.2f} | {same} of {batch} |"
        )
        del engine
        torch.cuda.empty_cache()


TINY = ModelConfig(
    "llama", vocab_size=160, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128,
    rms_eps=1e-6, rope_theta=10000.0, max_position=512,
)  # fmt: skip
EXPERTS = replace(TINY, ffn_size=64, num_experts=8, experts_per_token=3)
GPT_OSS = replace(
    EXPERTS, architecture="gpt_oss", attention_bias=True, output_bias=True, has_sinks=True, sliding_window=7,
    full_layers=(1,), activation="clamped_swiglu",
)  # fmt: skip
GEMMA = replace(
    TINY, architecture="gemma3_text", sliding_window=7, full_layers=(1,), qk_norm=True, local_rope_theta=1000.0,
    attention_scale=0.3, has_output_norms=True, embedding_scale=11.0, activation="gelu_tanh", tie_embeddings=True,
)  # fmt: skip
FAMILIES: dict[str, tuple[ModelConfig, str]] = {
    "llama": (TINY, "dense"),
    "llama, 4-bit groups of 128": (TINY, "float16 128"),
    "llama, 4-bit groups of 32": (TINY, "bfloat16 32"),
    "qwen2": (replace(TINY, attention_bias=True), "dense"),
    "qwen3": (replace(TINY, qk_norm=True), "dense"),
    "qwen3_moe": (replace(EXPERTS, architecture="qwen3_moe", qk_norm=True), "dense"),
    "qwen3_moe, 4-bit": (replace(EXPERTS, architecture="qwen3_moe", qk_norm=True, ffn_size=128), "float16 128"),
    "gemma3_text": (GEMMA, "dense"),
    "gpt_oss": (GPT_OSS, "dense"),
    "gpt_oss, MXFP4": (GPT_OSS, "mxfp4"),
}


class TinyWeights:
    """Random weights on the host, equal for equal names."""

    def __init__(self, config: ModelConfig, form: str) -> None:
        self._config, self._form = config, form

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str) -> Weight:
        outputs, inputs = weight_shape(self._config, name)
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
        fine, offsets = (one.repeat_interleave(group // 32, 1) for one in (scales, -zeros * scales))
        return FourBit(codes, fine, offsets, 32, stored_group=group, scale_dtype=dtype)

    def vector(self, name: str) -> torch.Tensor:
        drawn = 0.3 * torch.randn(weight_shape(self._config, name), generator=self._draw(name))
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


def families(options: argparse.Namespace) -> Iterator[str]:
    from paceline.models.gpu.runner import GpuRunner

    yield "| family | float32: largest difference | bfloat16: largest difference | largest logit |"
    chosen = list(FAMILIES.items())
    for name, (config, form) in chosen if options.part is None else chosen[options.part :: TUNERS]:
        try:
            weights, gpu = TinyWeights(config, form), torch.device(options.device)
            reference = DecoderModel(config, Float32Activations(weights), torch.device("cpu"), torch.float32)
            found = []
            for dtype, prompt in ((torch.float32, 16), (torch.bfloat16, 100)):  # float32 takes long to compile
                expected = logits_of(reference, ModelRunner, prompt)
                ours = logits_of(DecoderModel(config, weights, gpu, dtype), GpuRunner, prompt)
                found.append(float((ours - expected).abs().max()))
            yield f"| {name} | {found[0]:.1e} | {found[1]:.1e} | {float(expected.abs().max()):.2f} |"
        except Exception as error:
            traceback.print_exc()
            yield f"| {name} | failed: {error!r:.200} |"


def kernels(options: argparse.Namespace) -> Iterator[str]:
    """4-bit matrices of the 8B shape with cold weights."""
    from paceline.kernels.gpu.linear import Normed, gate_up, linear
    from paceline.kernels.gpu.tiles import Tile, four_bit_key, four_bit_tile

    yield "| matrix | rows | tile | us | floor, us | share |"
    generator, best = torch.Generator("cuda").manual_seed(0), dict[str, list[int]]()
    for name, outputs, inputs, paired in (
        ("qkv", 6144, 4096, True),
        ("output", 4096, 4096, False),
        ("gate and up", 28672, 4096, True),
        ("down", 4096, 14336, False),
    ):
        size = outputs * inputs * 4.25 / 8
        weights = [
            random_four_bit(outputs, inputs, "float16", 0.02, generator) for _ in range(max(2, int(400e6 / size)))
        ]
        for rows in (1, 8, 16, 64):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            normed = Normed(x, torch.ones(rows, 64, device="cuda"), 1e-5)
            tiles = [four_bit_tile(rows, outputs, inputs, is_paired=paired)]
            if options.tune and rows in (1, 64):
                tiles += [
                    Tile(n, k, warps, stages, splits=splits)
                    for n, warps in (
                        ((16, 1), (32, 1), (32, 2), (64, 4)) if rows == 1 else ((64, 4), (128, 4), (128, 8))
                    )
                    for k in ((128, 256) if rows == 1 else (128,))
                    for stages in ((3, 4, 6) if rows == 1 else (3, 4))
                    for splits in (1, 2, 4, 8)
                ]
            tiles = tiles[options.part :: TUNERS] if options.part is not None else tiles
            times = {}
            for tile in tiles:
                try:
                    call = partial(gate_up, normed, tile=tile) if paired else partial(linear, x, tile=tile)
                    times[tile] = microseconds(call, weights)
                except Exception as error:
                    yield f"| {name} | {rows} | {tile} | failed: {error!r:.100} |"
            for tile in sorted(times, key=times.__getitem__)[:3]:
                us, floor = times[tile], size / BANDWIDTH * 1e6
                yield f"| {name} | {rows} | {tile} | {us:.1f} | {floor:.1f} | {floor / us:.2f} |"
            if options.tune and rows in (1, 64) and times:
                tile = min(times, key=times.__getitem__)
                values = [tile.outputs, tile.inputs, tile.warps, tile.stages, tile.ahead, tile.splits]
                best[four_bit_key(rows == 1, outputs, inputs, paired)] = values
    if options.tune:
        yield json.dumps(best)


def microseconds(call: Callable[[FourBitWeight], object], weights: list[FourBitWeight]) -> float:
    """Time of one call, of a graph of calls with different weights."""
    call(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    return 1e6 * replay_seconds(graph) / len(weights)


def sections(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[str]]]:
    return {
        "families": lambda: families(options),
        "kernels": lambda: kernels(options),
        **{name: (lambda name=name: decoding(name, options)) for name in SHAPES},
    }


def compile_all(chosen: list[str], tune: bool) -> None:
    """Run each section with few layers in a process of its own, so that the kernels are compiled in parallel."""
    started = time.perf_counter()
    tuning = [("--tune", "--part", str(part)) for part in range(TUNERS)] if tune else [()]
    few = "--layers", "3", "--tokens", "6", "--repeats", "1", "--compiled"
    batches = {name: (("--batches", "1"), ("--batches", "8")) if name in SHAPES else [()] for name in chosen}
    batches |= {"kernels": tuning} if "kernels" in chosen else {}
    batches |= {"families": [("--part", str(part)) for part in range(TUNERS)]} if "families" in chosen else {}
    processes = [
        Popen([sys.executable, __file__, "--only", name, *few, *batch], stdout=DEVNULL, stderr=DEVNULL)
        for name in chosen
        for batch in batches[name]
    ]
    for process in processes:
        process.wait()
    print(f"kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
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
    parser.add_argument("--device", default="cuda", help="cpu runs a section with Triton's interpreter")
    parser.add_argument("--tune", action="store_true", help="time many tiles of 4-bit matrices")
    parser.add_argument("--part", type=int, help="only every eighth family or tile, beginning with this one")
    parser.add_argument("--compiled", action="store_true", help="do not compile kernels in other processes first")
    options = parser.parse_args()
    options.batches = options.batches or [1, 8]
    chosen = options.only or ["families", "kernels", *SHAPES]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a GPU")
    if not options.compiled:
        compile_all(chosen, options.tune)
    began = time.perf_counter()
    lines = sections(options)
    for name in chosen:
        print(f"\n## {name}", flush=True)
        if name in SHAPES:
            print(
                "| shape | batch | plain, ms/step | on the device | floor | share | speculative, ms per token of each | "
                "speed-up | alpha | tokens/round | same text |"
            )
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
