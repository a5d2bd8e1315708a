"""Compiles the kernels of a pass for an H200 without having one: the compiler may reject what the interpreter accepts."""

import torch

from tests.kernels.gpu.fake_hopper import COMPILED  # isort: skip  # before any kernel

from paceline.kernels.gpu.attention import paged_attention
from paceline.kernels.gpu.attention_plan import attention_plan
from paceline.kernels.gpu.linear import add_linear, embed, gate_up, linear, qkv_rotary_store
from paceline.kernels.linear import DenseWeight


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
