"""Blocks as bytes: out of one runner and into another, nothing is lost and nothing else is touched."""

import pytest
import torch

from paceline.models import kv_blocks
from paceline.models.runner import ModelRunner, Span
from tests.fakes import TINY, tiny_model

MODEL = tiny_model()
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def runner(dtype: torch.dtype = torch.float32, filled: bool = True) -> ModelRunner:
    made = ModelRunner(MODEL, 8, dtype)
    if filled:
        generator = torch.Generator().manual_seed(3)
        for plane in kv_blocks.planes(made):
            plane.copy_(torch.randint(0, 120, plane.shape, dtype=torch.uint8, generator=generator))
    return made


def same(ours: ModelRunner, mine: int, theirs: ModelRunner, other: int) -> bool:
    pairs = zip(kv_blocks.planes(ours), kv_blocks.planes(theirs), strict=True)
    return all(torch.equal(a[mine], b[other]) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_move_between_runners_bit_for_bit(dtype: torch.dtype) -> None:
    giver, taker = runner(dtype), runner(dtype, filled=False)
    data = bytearray(3 * kv_blocks.block_bytes(giver))
    kv_blocks.read_blocks(giver, [5, 0, 2], memoryview(data))
    kv_blocks.write_blocks(taker, [1, 7, 4], memoryview(data).toreadonly())
    assert same(taker, 1, giver, 5)
    assert same(taker, 7, giver, 0)
    assert same(taker, 4, giver, 2)
    assert all(not plane[[0, 2, 3, 5, 6]].any() for plane in kv_blocks.planes(taker))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_make_up_a_block(dtype: torch.dtype) -> None:
    giver, taker = runner(dtype), runner(dtype, filled=False)
    size = kv_blocks.layer_bytes(giver)
    assert size * TINY.num_layers == kv_blocks.block_bytes(giver)
    whole = bytearray(kv_blocks.block_bytes(giver))
    kv_blocks.read_blocks(giver, [6], whole)
    for layer in range(TINY.num_layers):
        part = bytearray(2 * size)
        kv_blocks.read_layer(giver, layer, [6, 3], part)
        assert part[:size] == whole[layer * size : (layer + 1) * size]
        kv_blocks.write_layer(taker, layer, [0, 1], bytes(part))
    assert same(taker, 0, giver, 6)
    assert same(taker, 1, giver, 3)


def test_a_sequence_goes_on_over_blocks_that_came_as_bytes() -> None:
    text = [i * 7 % TINY.vocab_size for i in range(37)]
    giver, taker = runner(filled=False), runner(filled=False)
    giver.forward([Span([3, 1, 5], 0, text[:32], 0)])
    expected = giver.forward([Span([3, 1, 5], 32, text[32:], 5)]).logits
    data = bytearray(2 * kv_blocks.block_bytes(giver))
    kv_blocks.read_blocks(giver, [3, 1], data)
    kv_blocks.write_blocks(taker, [6, 0], data)
    logits = taker.forward([Span([6, 0, 2], 32, text[32:], 5)]).logits
    assert expected is not None
    assert logits is not None
    assert torch.equal(expected, logits)


def test_a_wrong_size_is_refused_before_anything_is_written() -> None:
    part = runner()
    with pytest.raises(ValueError, match="these blocks take"):
        kv_blocks.write_blocks(part, [0, 1], bytes(kv_blocks.block_bytes(part)))
    with pytest.raises(ValueError, match="these blocks take"):
        kv_blocks.read_layer(part, 0, [0], bytearray(7))


def test_no_blocks_are_no_bytes() -> None:
    kv_blocks.read_blocks(runner(), [], bytearray())
    kv_blocks.write_blocks(runner(), [], b"")
