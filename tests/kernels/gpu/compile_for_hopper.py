"""Compiles the kernels of a pass for an H200 where there is none: what the interpreter takes, the compiler may refuse.

A script, because a process either interprets kernels or compiles them. Launches become compilations; the tensors, which
nothing computes, are on the CPU.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

COMPILED: set[str] = set()


def compile_only(kernel: JITFunction, grid: Any) -> Any:
    COMPILED.add(kernel.__name__)
    return functools.partial(kernel.warmup, grid=grid)


driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)
JITFunction.__getitem__ = compile_only

from paceline.kernels.gpu import launch  # noqa: E402

launch.PDL.update(PDL=True, launch_pdl=True)

from paceline.kernels.gpu.attention import paged_attention  # noqa: E402
from paceline.kernels.gpu.attention_plan import attention_plan  # noqa: E402
from paceline.kernels.gpu.linear import add_linear, embed, gate_up, linear, qkv_rotary_store  # noqa: E402
from paceline.kernels.linear import DenseWeight  # noqa: E402


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def compile_pass(rows: int, splits: int, is_tree: bool) -> None:
    """One layer and the head, 512 wide, heads of 128."""
    ids, norm, cache = torch.zeros(rows, dtype=torch.int64), zeros(512), zeros(4, 16, 1, 128)
    angles = torch.zeros(64, 64)
    hidden, normed = embed(ids, zeros(64, 512), norm, 1e-5)
    q = qkv_rotary_store(normed, DenseWeight(zeros(768, 512)), None, angles, angles, ids, ids, cache, cache, 4)
    plan = attention_plan(rows, 1, rows, 4, 1, 128, "cpu", num_splits=splits)
    starts, context = torch.tensor([0, rows]).int(), torch.tensor([8]).int()
    attended = paged_attention(
        q, cache, cache, starts, context, torch.zeros(1, 4).int(), plan, 0.1, ids if is_tree else None
    )
    hidden, normed = add_linear(attended, DenseWeight(zeros(512, 512)), hidden, norm, 1e-5)
    gated = gate_up(normed, DenseWeight(zeros(1024, 512)))
    hidden, normed = add_linear(gated, DenseWeight(zeros(512, 512)), hidden, norm, 1e-5)
    linear(normed, DenseWeight(zeros(64, 512)), out_dtype=torch.float32)


if __name__ == "__main__":
    compile_pass(rows=1, splits=4, is_tree=False)
    compile_pass(rows=8, splits=1, is_tree=True)
    print(" ".join(sorted(COMPILED)))
