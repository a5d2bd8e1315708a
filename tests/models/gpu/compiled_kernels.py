"""Prints the number of kernels that a warm-up compiles for an H200, and the kernels that random batches use besides."""

import random
from typing import Any

import torch
from torch import Tensor

from tests.specs import changed

from tests.kernels.gpu.fake_hopper import COMPILED  # isort: skip  # before any kernel

import triton

from paceline.engine.graph.mixed import MixedSteps, SlotInputs
from paceline.engine.graph.slot_params import WARM_UP_ALL, WARM_UP_FEATURES, WARM_UP_SAMPLING, Slot
from paceline.engine.graph.slots import DeviceSlots
from paceline.kernels import linear
from paceline.kernels.cpu import native
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.gpu.attention import plan as attention_plan
from paceline.models.decoder import gpu_ops as gpu_decoder
from paceline.models.decoder.forward import DecoderModel
from paceline.models.decoder.gpu_ops import gpu_forward
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads.eagle import eagle_gpu as gpu_eagle
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.heads.eagle.eagle_gpu import gpu_eagle_forward, gpu_eagle_norm, plan_eagle
from paceline.models.runner.gpu.passes import PassKind
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.models.runner.runner import Span
from paceline.policy.step import padded_size
from tests.fakes import TINY, RandomWeights
from tests.heads import tiny_eagle

MANY, FEW, MAX_ROWS, LONGEST = 80, 3, 1024, 512
TARGET = changed(TINY, num_layers=1, hidden_size=64, num_heads=32, num_kv_heads=8, head_dim=16, max_position=LONGEST)
DRAFT = changed(TARGET, num_heads=9, num_kv_heads=3)
NO_SHARED_HEADS = changed(TARGET, num_heads=4, num_kv_heads=4)

used_kernels: set[tuple[str, str]] = set()


def record_kernel(*, key: str, fn: Any, **other: Any) -> bool:
    used_kernels.add((fn.name, key))
    return True  # skip the compilation


def run_random_batch(runner: GpuRunner, draw: random.Random, max_num_seqs: int, has_trees: bool) -> None:
    """One pass as a scheduler may request it: sequences that decode, drafts, prompts and chunks of prompts."""
    rows_left, spans = MAX_ROWS, []
    for _ in range(min(max_num_seqs, draw.choice([1, 1, 2, 3, 8, 20, 40, MANY]))):
        most = min(rows_left, LONGEST, draw.choice([1, 1, 4, 12, 40, LONGEST]))
        if most == 0:
            break
        rows = draw.randint(1, most)
        context = draw.randint(0, LONGEST - rows)
        is_tree = has_trees and 1 < rows <= 8
        spans.append(
            Span(
                blocks=[0] * (LONGEST // 16),
                context_len=context,
                tokens=[0] * rows,
                num_logits=rows if is_tree else draw.randint(0, min(rows, 5)),
                ancestors=[1] * rows if is_tree else None,
            )
        )
        rows_left -= rows
    runner.forward(spans)


def missing(config: DecoderSpec, max_num_seqs: int, has_trees: bool) -> tuple[int, set[tuple[str, str]]]:
    """(number of compiled kernels, further kernels that random batches use)."""
    model = DecoderModel(config, RandomWeights(config, seed=0), torch.device("cpu"), torch.bfloat16)
    runner = GpuRunner(model, num_blocks=2 * LONGEST // 16)
    used_kernels.clear()
    runner.warm_up(max_num_seqs, MAX_ROWS, LONGEST, [PassKind(is_tree) for is_tree in {False, has_trees}])
    compiled = set(used_kernels)
    draw = random.Random(0)
    for _ in range(150):
        run_random_batch(runner, draw, max_num_seqs, has_trees)
    return len(compiled), used_kernels - compiled


def missing_for_head(max_num_seqs: int, num_lanes: int) -> tuple[int, set[tuple[str, str]]]:
    """The same for an EAGLE head: prompts and committed tokens, then levels of trees."""
    target = DecoderModel(TARGET, RandomWeights(TARGET, seed=0), torch.device("cpu"), torch.bfloat16)
    runner = EagleRunner(tiny_eagle(target), 2 * LONGEST // 16, num_lanes)
    used_kernels.clear()
    runner.warm_up(max_num_seqs, MAX_ROWS, LONGEST)
    compiled = set(used_kernels)
    draw = random.Random(0)
    for _ in range(150):
        rows_left, spans = MAX_ROWS, []
        for _ in range(draw.randint(1, max_num_seqs)):
            rows = draw.randint(1, max(1, min(rows_left, draw.choice([1, 4, 40, LONGEST]))))
            spans.append(Span([0] * (LONGEST // 16), draw.randint(0, LONGEST - rows), [0] * rows, 0))
            rows_left -= rows
            if rows_left <= 0:
                break
        states = torch.zeros(sum(len(span.tokens) for span in spans), TARGET.hidden_size, dtype=torch.bfloat16)
        runner.model.logits(runner.forward(spans, states)[: len(spans)])
        trees = draw.randint(1, min(max_num_seqs, num_lanes))
        count, width = trees * draw.randint(1, num_lanes // trees), draw.randint(1, LONGEST // 16)
        layout = AttentionLayout(
            slots=torch.zeros(count, dtype=torch.int64),
            starts=torch.arange(count + 1, dtype=torch.int32),
            context_lens=torch.zeros(count, dtype=torch.int32),
            block_tables=torch.zeros(count, width, dtype=torch.int32),
        )
        level = torch.zeros(count, TARGET.hidden_size, dtype=torch.bfloat16)
        ids = torch.zeros(count, dtype=torch.int64)
        out = runner.model.forward(level, ids, ids, layout, runner.cache, runner.model.plan(count, count))
        runner.model.logits(out)
    return len(compiled), used_kernels - compiled


def missing_for_mixed(config: DecoderSpec, max_num_seqs: int, max_depth: int) -> tuple[int, set[tuple[str, str]]]:
    """The same for mixed steps, besides the kernels of other passes: any number of sequences decode, with drafts of any depth,
    beside any prompts."""
    model = DecoderModel(config, RandomWeights(config, seed=0), torch.device("cpu"), torch.bfloat16)
    runner = GpuRunner(model, num_blocks=2 * LONGEST // 16)
    slots = DeviceSlots(padded_size(max_num_seqs), runner.device, vocab_size=config.vocab_size)
    most_decoding = slots.size * (1 + max_depth)
    steps = MixedSteps(runner, slots, MAX_ROWS, min(MAX_ROWS, most_decoding), 2)
    runner.warm_up(max_num_seqs, MAX_ROWS, LONGEST)
    before = set(used_kernels)
    steps.warm_up(MAX_ROWS, max_depth)
    compiled = set(used_kernels)
    draw = random.Random(0)
    for _ in range(150):
        slots.load([Slot((0, 0), draw.choice((*WARM_UP_SAMPLING, *WARM_UP_FEATURES, WARM_UP_ALL)), 0, 0)])
        depth = draw.randint(0, max_depth)
        count = draw.randint(0, min(max_num_seqs - 1, MAX_ROWS // (2 * (1 + depth))))
        size = padded_size(count or 1)
        tables = torch.zeros(size, runner.table_width, dtype=torch.int32)
        active, limits = torch.zeros(2 * size, dtype=torch.int32).split(size)  # adjacent, as in a batch
        drafts = torch.zeros(size, depth, dtype=torch.int64) if depth else None
        room, prompts = MAX_ROWS - count * (1 + depth), list[Span]()
        for _ in range(draw.randint(1, max_num_seqs - count)):
            rows = draw.randint(1, max(1, min(room, draw.choice([1, 12, LONGEST]))))
            prompts.append(Span([0] * (LONGEST // 16), draw.randint(0, LONGEST - rows), [0] * rows, draw.randint(0, 1)))
            room -= rows
            if room <= 0:
                break
        ending = [count + i for i in range(sum(span.num_logits for span in prompts))]
        inputs = SlotInputs(tables, active, limits, drafts)
        for longs, _, _ in steps._passes._inputs._staging:  # kernels do not write the tokens that decode
            longs.zero_()
        steps._compute(steps._buffers[0], inputs, range(count), prompts, ending)
    return len(compiled - before), used_kernels - compiled


def not_computed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces products of many rows, which use a library on a GPU and would take minutes on a CPU without bf16."""
    return x.new_zeros(*x.shape[:-1], len(weight))


def use_gpu_code_paths() -> None:
    """Make passes on the CPU use the code of the GPU."""
    native.library = lambda: None
    for module in (linear, gpu_decoder, gpu_eagle):
        module.dense_linear = not_computed  # type: ignore[attr-defined]
    attention_plan._multiprocessors = lambda device: 132
    DecoderModel.forward = gpu_forward  # type: ignore[method-assign, assignment]
    EagleModel.forward = gpu_eagle_forward  # type: ignore[method-assign, assignment]
    EagleModel.plan = plan_eagle  # type: ignore[method-assign, assignment]
    EagleModel.logits = lambda model, states: model.vocabulary.logits(gpu_eagle_norm(model, states))  # type: ignore[method-assign]


if __name__ == "__main__":
    triton.knobs.runtime.jit_cache_hook = record_kernel
    use_gpu_code_paths()
    cases = (TARGET, MANY, True), (DRAFT, MANY, False), (NO_SHARED_HEADS, MANY, False), (TARGET, FEW, True)
    found = [missing(*case) for case in cases] + [missing_for_head(*sizes) for sizes in ((MANY, 256), (FEW, 32))]
    found += [missing_for_mixed(TARGET, MANY, 8), missing_for_mixed(TARGET, FEW, 0)]
    for count, others in found:
        print(count, *sorted(f"{name} {key}" for name, key in others), sep="\n")
    assert COMPILED
