"""4-bit weights and routed experts on one GPU: plain and speculative decoding beside the memory floor, and logits of families.

    python benchmarks/gpu_families.py                        # all sections, about 100 s on an H200
    python benchmarks/gpu_families.py --only kernels --tune  # times tiles of 4-bit matrices and prints the best as JSON

Weights are random and made on the device. The layers after the first two add little to the residual stream (--noise), so that a
draft of the first two layers often agrees with the whole model. Kernels are compiled first, by one process for each section.

Floor: the time to read the weights of a step once at the speed of a large copy. Of experts, those that a batch is expected to
use count, if routing is uniform.
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from statistics import median
from subprocess import DEVNULL, Popen

import torch
from gpu_families_kernels import kernel_lines
from gpu_families_logits import family_lines
from gpu_families_models import PARTS, SHAPES, RandomModel
from gpu_runs import Run, decode, switch

from paceline.core.clock import WallClock
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import Limits, RequestValidator
from paceline.kv.block_tables import BlockTables
from paceline.speculation.depth.breaker import Breaker, BreakerRule
from paceline.speculation.depth.simple_rules import FixedDepth

DEVICE = torch.device("cuda")
HEADER = (
    "| shape | batch | plain, ms/step | on the device | floor | share | speculative, ms per token of each | "
    "speed-up | alpha | tokens/round | same text |"
)


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
    """Plain and speculative runs of one batch beside `floor`, the least milliseconds of a step."""
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
        parser.error("this needs a GPU; tests/engine/executors/graph/test_families.py checks the families without one")
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
