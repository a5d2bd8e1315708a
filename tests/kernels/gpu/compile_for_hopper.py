"""Compiles the kernels of a pass for an H200 without having one: the compiler may reject what the interpreter accepts."""

import torch

from tests.kernels.gpu.fake_hopper import COMPILED  # isort: skip  # before any kernel

from paceline.kernels.formats.activation import Activation
from paceline.kernels.formats.experts import Experts, Routing
from paceline.kernels.formats.four_bit import FourBitWeight, Kind
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import attention_plan
from paceline.kernels.gpu.attention.prompts import prompt_attention
from paceline.kernels.gpu.cache.rows import copy_rows
from paceline.kernels.gpu.experts.feed import feed_experts
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.linear import add_linear, embed, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.rank_sum import MAX_PROGRAMS, add_ranks
from paceline.kernels.gpu.rms_norm import rms_norm
from paceline.kernels.gpu.speculation.edits import DraftedRows, EditTensors, count_tokens, edit_logits
from paceline.kernels.gpu.speculation.scores import COLUMNS, score_scratch, score_tokens
from paceline.kernels.gpu.tiles import Tile


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def compile_pass(rows: int, splits: int, is_tree: bool, cache_dtype: torch.dtype = torch.bfloat16) -> None:
    """One layer and the head, 512 wide, heads of 128."""
    ids, norm, cache = torch.zeros(rows, dtype=torch.int64), zeros(512), zeros(4, 16, 1, 128).to(cache_dtype)
    angles = torch.zeros(64, 64)
    hidden, normed = embed(ids, zeros(64, 512), norm, 1e-5)
    q = qkv_rotary_store(normed, DenseWeight(zeros(768, 512)), None, angles, angles, ids, ids, cache, cache, 4)
    plan = attention_plan(rows, 1, rows, 4, 1, 128, 64, "cpu", num_splits=splits, is_tree=is_tree)
    starts, context = torch.tensor([0, rows]).int(), torch.tensor([8]).int()
    attended = paged_attention(
        q, cache, cache, starts, context, torch.zeros(1, 4).int(), plan, 0.1, ids if is_tree else None
    )
    hidden, normed = add_linear(attended, DenseWeight(zeros(512, 512)), hidden, norm, 1e-5)
    inner = gate_up(normed, DenseWeight(zeros(1024, 512)))
    hidden, _ = add_linear(inner, DenseWeight(zeros(512, 512)), hidden, norm, 1e-5)
    linear(rms_norm(hidden, norm, 1e-5), DenseWeight(zeros(64, 512)), out_dtype=torch.float32)


def four_bit(outputs: int, inputs: int, kind: Kind) -> FourBitWeight:
    group = 64 if kind == "mxfp4" else 128
    codes = torch.zeros(outputs // 16, inputs // group, 16, group // 2, dtype=torch.uint8)
    return FourBitWeight(codes, torch.zeros(inputs // 128, outputs).int(), (outputs, inputs), group, kind)


def compile_four_bit(rows: int, kind: Kind) -> None:
    """The products of a layer, 512 wide."""
    hidden, normed = embed(torch.zeros(rows, dtype=torch.int64), zeros(64, 512), zeros(512), 1e-5)
    ids, cache, angles = torch.zeros(rows, dtype=torch.int64), zeros(4, 16, 1, 128), torch.zeros(64, 64)
    qkv_rotary_store(normed, four_bit(768, 512, kind), None, angles, angles, ids, ids, cache, cache, 4)
    inner = gate_up(normed, four_bit(1024, 512, kind))
    add_linear(inner, four_bit(512, 512, kind), hidden, zeros(512), 1e-5)


def compile_many_rows(dtype: torch.dtype, tile: Tile) -> None:
    """A product of 8-bit weights and 200 rows."""
    weight = QuantizedWeight(torch.zeros(512, 512, dtype=dtype), torch.zeros(512, 1))
    linear(zeros(200, 512), weight, tile=tile)


def compile_experts(rows: int, dtype: torch.dtype | Kind, activation: Activation, *, biases: bool) -> None:
    """Four experts of 256 inputs and 128 inner values."""
    shapes = (4 * 256, 256), (4 * 256, 128)
    weights: list[LinearWeight] = [DenseWeight(zeros(*shape)) for shape in shapes]
    if not isinstance(dtype, torch.dtype):
        weights = [four_bit(*shape, dtype) for shape in shapes]
    elif dtype is not torch.bfloat16:
        weights = [QuantizedWeight(torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], 1)) for shape in shapes]
    vectors = (zeros(4), zeros(4 * 256), zeros(4 * 256)) if biases else ()
    routing = Routing(4, 2, is_normalized=True)
    feed_experts(zeros(rows, 256), Experts(routing, activation, DenseWeight(zeros(4, 256)), *weights, *vectors))


def compile_edits(each: int, is_tree: bool) -> None:
    """Logits of two slots, with drafts if a slot has several rows."""
    floats, ints = torch.zeros(3, 2), torch.zeros(3, 2).int()
    lists = torch.zeros(2, 512).int(), torch.zeros(2, 512), torch.zeros(2, 64).int(), torch.zeros(2, 5000).int()
    edits, tokens = EditTensors(*floats, *ints, *lists), torch.zeros(2, each - 1, dtype=torch.int64)
    positions = torch.zeros(2 * each, dtype=torch.int64)
    drafted = DraftedRows(tokens, each, 2 * each, ancestors=positions if is_tree else None) if each > 1 else None
    edit_logits(torch.zeros(2 * each, 5000), positions, edits, each=each, drafted=drafted)
    edit_logits(torch.zeros(2 * each, 5000), positions, edits, positions, drafted=drafted)
    count_tokens(torch.zeros(2, each, dtype=torch.int64), edits)
    count_tokens(torch.zeros(2, each, dtype=torch.int64), edits, positions[:2])


def compile_scores(vocab_size: int) -> None:
    """Two tokens of three slots."""
    places, out = torch.zeros(6, dtype=torch.int64), torch.zeros(6, COLUMNS).int()
    scratch = score_scratch(6, vocab_size, torch.device("cpu"))
    for slots in (None, places[:3]):
        num_top = torch.zeros(3).int()
        score_tokens(torch.zeros(6, vocab_size), places, places, num_top, 2, scratch, out, slots)


if __name__ == "__main__":
    for each, is_tree in ((1, False), (4, False), (8, True)):
        compile_edits(each, is_tree)
    for vocab_size in (700, 151_936):
        compile_scores(vocab_size)
    compile_pass(rows=1, splits=4, is_tree=False)
    compile_pass(rows=8, splits=1, is_tree=True)
    compile_pass(rows=8, splits=1, is_tree=True, cache_dtype=torch.float8_e4m3fn)
    compile_experts(80, torch.int8, "silu", biases=False)
    compile_experts(8, torch.bfloat16, "clamped_swiglu", biases=True)
    compile_experts(1, "mxfp4", "clamped_swiglu", biases=True)
    compile_four_bit(5, "float16")
    compile_four_bit(100, "bfloat16")
    compile_four_bit(1, "mxfp4")
    compile_many_rows(torch.float8_e4m3fn, Tile(128, 128, 8, 3, rows=256))
    compile_many_rows(torch.int8, Tile(256, 64, 8, 4, splits=2, rows=128))
    gated(zeros(2, 256), "gelu_tanh")
    copy_rows([0], [0], [0], [0], (4096, 8192), 4096, torch.device("cpu"))
    prompt_attention(zeros(256, 4, 128), zeros(300, 1, 128), zeros(300, 1, 128), 0, 256, 0.1, zeros(256, 512))
    for dtype in (torch.bfloat16, torch.int64):
        add_ranks(torch.zeros(300, dtype=dtype), torch.zeros(2).long(), torch.zeros(MAX_PROGRAMS).int(), 1)
    print(" ".join(sorted(COMPILED)))
