"""Prints the kernels that a rehearsal compiles on an H200, and of those that random traffic then wants the ones it did not."""

import random
from dataclasses import replace
from typing import Any

import torch

from tests.kernels.gpu.pretended_hopper import COMPILED  # isort: skip  # before any kernel

import triton

from paceline.kernels import native
from paceline.kernels.gpu import attention_plan
from paceline.models.config import ModelConfig
from paceline.models.gpu_decoder import gpu_forward
from paceline.models.gpu_runner import GpuRunner
from paceline.models.llama import DecoderModel
from paceline.models.runner import Span
from tests.fakes import TINY, RandomWeights

MANY, FEW, MAX_ROWS, LONGEST = 80, 3, 1024, 512
TARGET = replace(TINY, num_layers=1, hidden_size=64, num_heads=32, num_kv_heads=8, head_dim=16, max_position=LONGEST)
DRAFT = replace(TARGET, num_heads=9, num_kv_heads=3)
EVERY_HEAD_ITS_OWN = replace(TARGET, num_heads=4, num_kv_heads=4)

wanted: set[tuple[str, str]] = set()


def note(*, key: str, fn: Any, **told: Any) -> bool:
    wanted.add((fn.name, key))
    return True  # nothing need be compiled for that


def traffic(runner: GpuRunner, draw: random.Random, max_num_seqs: int, has_trees: bool) -> None:
    """One pass, as a scheduler may ask for it: who decodes, drafts beside them, prompts and pieces of prompts."""
    room, spans = MAX_ROWS, []
    for _ in range(min(max_num_seqs, draw.choice([1, 1, 2, 3, 8, 20, 40, MANY]))):
        most = min(room, LONGEST, draw.choice([1, 1, 4, 12, 40, LONGEST]))
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
        room -= rows
    runner.forward(spans)


def missing(config: ModelConfig, max_num_seqs: int, has_trees: bool) -> tuple[int, set[tuple[str, str]]]:
    """How many were compiled, and which are wanted besides."""
    model = DecoderModel(config, RandomWeights(config, seed=0), torch.device("cpu"), torch.bfloat16)
    runner = GpuRunner(model, num_blocks=2 * LONGEST // 16)
    wanted.clear()
    runner.rehearse(max_num_seqs, MAX_ROWS, LONGEST, has_trees)
    rehearsed = set(wanted)
    draw = random.Random(0)
    for _ in range(150):
        traffic(runner, draw, max_num_seqs, has_trees)
    return len(rehearsed), wanted - rehearsed


if __name__ == "__main__":
    triton.knobs.runtime.jit_cache_hook = note
    native.library = lambda: None  # weights as a GPU has them
    attention_plan._multiprocessors = lambda device: 132
    DecoderModel.forward = gpu_forward  # type: ignore[method-assign, assignment]  # as on a GPU
    cases = (TARGET, MANY, True), (DRAFT, MANY, False), (EVERY_HEAD_ITS_OWN, MANY, False), (TARGET, FEW, True)
    for case in cases:
        count, others = missing(*case)
        print(count, *sorted(f"{name} {key}" for name, key in others), sep="\n")
    assert COMPILED
