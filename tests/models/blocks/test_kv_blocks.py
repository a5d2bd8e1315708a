"""Blocks as bytes are copied between runners exactly, and no other block changes."""

import pytest
import torch

from paceline.core.sequence import BLOCK_SIZE
from paceline.models.blocks import kv_blocks
from paceline.models.runner.runner import Cache, ModelRunner, Span
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


def same(first: ModelRunner, first_block: int, second: ModelRunner, second_block: int) -> bool:
    pairs = zip(kv_blocks.planes(first), kv_blocks.planes(second), strict=True)
    return all(torch.equal(a[first_block], b[second_block]) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_move_between_runners_bit_for_bit(dtype: torch.dtype) -> None:
    source, destination = runner(dtype), runner(dtype, filled=False)
    data = bytearray(3 * kv_blocks.block_bytes(source))
    kv_blocks.read_blocks(source, [5, 0, 2], memoryview(data))
    kv_blocks.write_blocks(destination, [1, 7, 4], memoryview(data).toreadonly())
    assert same(destination, 1, source, 5)
    assert same(destination, 7, source, 0)
    assert same(destination, 4, source, 2)
    assert all(not plane[[0, 2, 3, 5, 6]].any() for plane in kv_blocks.planes(destination))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_consists_of_its_layers(dtype: torch.dtype) -> None:
    source, destination = runner(dtype), runner(dtype, filled=False)
    size = kv_blocks.layer_bytes(source)
    assert size * TINY.num_layers == kv_blocks.block_bytes(source)
    whole = bytearray(kv_blocks.block_bytes(source))
    kv_blocks.read_blocks(source, [6], whole)
    for layer in range(TINY.num_layers):
        part = bytearray(2 * size)
        kv_blocks.read_layer(source, layer, [6, 3], part)
        assert part[:size] == whole[layer * size : (layer + 1) * size]
        kv_blocks.write_layer(destination, layer, [0, 1], bytes(part))
    assert same(destination, 0, source, 6)
    assert same(destination, 1, source, 3)


class SplitRunner(ModelRunner):
    """The first of `num_ranks` ranks; their caches are in this process. `num_head_shares` is 2: four ranks have two copies."""

    num_head_shares = 2

    def __init__(self, num_ranks: int) -> None:
        super().__init__(MODEL, 8)
        shape = (8, BLOCK_SIZE, TINY.num_kv_heads // 2, TINY.head_dim)
        self.ranks: list[Cache] = [
            [(torch.zeros(shape), torch.zeros(shape)) for _ in range(TINY.num_layers)] for _ in range(num_ranks)
        ]
        self.cache = self.ranks[0]

    def head_shares(self) -> list[list[Cache]]:
        copies = len(self.ranks) // 2
        return [self.ranks[:copies], self.ranks[copies:]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_bytes_of_a_block_do_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    whole, split = runner(), SplitRunner(num_ranks)
    assert kv_blocks.block_bytes(split) == kv_blocks.block_bytes(whole)
    data = bytearray(2 * kv_blocks.block_bytes(whole))
    kv_blocks.read_blocks(whole, [5, 2], data)
    kv_blocks.write_blocks(split, [1, 3], bytes(data))
    middle = TINY.num_kv_heads // 2
    for rank, cache in enumerate(split.ranks):
        heads = slice(0, middle) if rank < num_ranks // 2 else slice(middle, None)
        for (keys, values), (all_keys, all_values) in zip(cache, whole.cache, strict=True):
            assert torch.equal(keys[[1, 3]], all_keys[[5, 2]][:, :, heads])
            assert torch.equal(values[[1, 3]], all_values[[5, 2]][:, :, heads])
    back, layer = bytearray(len(data)), bytearray(kv_blocks.layer_bytes(whole))
    kv_blocks.read_blocks(split, [1, 3], back)
    assert back == data
    kv_blocks.read_layer(split, 1, [1], layer)
    assert layer == data[len(layer) : 2 * len(layer)]


def test_a_sequence_continues_over_copied_blocks() -> None:
    text = [i * 7 % TINY.vocab_size for i in range(37)]
    source, destination = runner(filled=False), runner(filled=False)
    source.forward([Span([3, 1, 5], 0, text[:32], 0)])
    expected = source.forward([Span([3, 1, 5], 32, text[32:], 5)]).logits
    data = bytearray(2 * kv_blocks.block_bytes(source))
    kv_blocks.read_blocks(source, [3, 1], data)
    kv_blocks.write_blocks(destination, [6, 0], data)
    logits = destination.forward([Span([6, 0, 2], 32, text[32:], 5)]).logits
    assert expected is not None
    assert logits is not None
    assert torch.equal(expected, logits)


def test_a_buffer_of_the_wrong_size_is_rejected() -> None:
    part = runner()
    with pytest.raises(ValueError, match="these blocks have"):
        kv_blocks.write_blocks(part, [0, 1], bytes(kv_blocks.block_bytes(part)))
    with pytest.raises(ValueError, match="these blocks have"):
        kv_blocks.read_layer(part, 0, [0], bytearray(7))


def test_an_empty_list_of_blocks_is_accepted() -> None:
    kv_blocks.read_blocks(runner(), [], bytearray())
    kv_blocks.write_blocks(runner(), [], b"")


def test_the_fingerprint_depends_on_everything_that_changes_the_bytes() -> None:
    runner, other = ModelRunner(MODEL, 4), ModelRunner(MODEL, 4, torch.bfloat16)
    fingerprints = {
        kv_blocks.cache_fingerprint(runner, "a", "none"),
        kv_blocks.cache_fingerprint(runner, "b", "none"),
        kv_blocks.cache_fingerprint(runner, "a", "int8"),
        kv_blocks.cache_fingerprint(other, "a", "none"),
    }
    assert len(fingerprints) == 4
    assert kv_blocks.cache_fingerprint(ModelRunner(MODEL, 9), "a", "none") in fingerprints
