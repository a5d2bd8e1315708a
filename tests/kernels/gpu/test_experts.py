import pytest
import torch

from paceline.kernels.activation import gated_reference
from paceline.kernels.experts import feed_experts_reference, route_reference
from paceline.kernels.formats.activation import Activation
from paceline.kernels.formats.experts import Experts, Routing, Scoring
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.quantized import QuantizedWeight, quantize
from paceline.kernels.gpu.experts.feed import feed_experts
from paceline.kernels.gpu.experts.routing import most_blocks, route, sort_pairs
from paceline.kernels.gpu.gated import gated
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE, on_device
from tests.kernels.gpu.test_four_bit import packed

EXPERTS, HIDDEN, INNER = 5, 160, 96


def draw(*shape: int, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=generator(seed)) * 0.2).to(DEVICE)


def make(per_token: int, activation: Activation = "silu", kind: str = "dense", *, biases: bool = False) -> Experts:
    matrices = [draw(EXPERTS * 2 * INNER, HIDDEN, seed=1), draw(EXPERTS * HIDDEN, INNER, seed=2)]
    weights: list[LinearWeight] = [DenseWeight(matrix) for matrix in matrices]
    if kind in ("int8", "groups"):
        weights = [quantize(matrix, "int8") for matrix in matrices]
    if kind == "groups":
        weights = [
            QuantizedWeight(one.values, torch.cat([one.scales] * -(-one.shape[1] // 128), 1) * draw(1, 1, seed=7).exp())
            for one in weights
            if isinstance(one, QuantizedWeight)
        ]
    if kind in ("float16 32", "mxfp4 32"):
        weights = [packed(*matrix.shape, kind) for matrix in matrices]
    vectors = [draw(count, seed=3) for count in (EXPERTS, *(one.shape[0] for one in weights))]
    routing = Routing(EXPERTS, per_token, is_normalized=True)
    return Experts(
        routing, activation, DenseWeight(draw(EXPERTS, HIDDEN, seed=0)), *weights, *(vectors if biases else ())
    )


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_routing_equals_the_reference(is_normalized: bool, scoring: Scoring, groups: tuple[int, int]) -> None:
    logits = torch.randn(6, 20, generator=generator(4)) * 3
    logits[:, 7] = logits[:, 3]
    logits[5] = 0.0
    bias = draw(20, seed=8).cpu() if scoring == "sigmoid" else None
    routing = Routing(20, 6, is_normalized, scoring, 1.5, *groups)
    ids, weights = route(*on_device(logits), routing, None if bias is None else bias.to(DEVICE))
    expected_ids, expected = route_reference(logits, routing, bias)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_rows", [4, 16])
@pytest.mark.parametrize("rows", [1, 5, 23, 700])
def test_pairs_are_sorted_by_expert_and_row(rows: int, block_rows: int) -> None:
    ids = torch.stack([torch.randperm(7, generator=generator(i))[:2] for i in range(rows)]).int()
    blocks = sort_pairs(*on_device(ids), 7, block_rows)
    flat = ids.view(-1).tolist()
    order = blocks.order.tolist()
    assert order == sorted(range(2 * rows), key=lambda pair: (flat[pair], pair))
    seen: list[int] = []
    for expert, begin, end in zip(*(one.tolist() for one in (blocks.experts, blocks.begins, blocks.ends)), strict=True):
        if begin < end:
            assert end - begin <= block_rows
            assert {flat[pair] for pair in order[begin:end]} == {expert}
            seen += range(begin, end)
    assert seen == list(range(2 * rows))


def test_a_block_for_every_pair_is_the_most() -> None:
    assert most_blocks(8, 128, 16) == 8
    assert most_blocks(64 * 8, 128, 16) == 128 + 32
    ids = torch.arange(7).int().view(7, 1)
    blocks = sort_pairs(*on_device(ids), 7, 16)
    assert blocks.count == 7
    assert (blocks.ends - blocks.begins).tolist() == [1] * 7


@pytest.mark.parametrize(
    ("rows", "activation", "kind", "biases"),
    [
        (1, "silu", "dense", False),
        (5, "silu", "int8", False),
        (3, "silu", "groups", False),
        (4, "clamped_swiglu", "dense", True),
        (70, "silu", "dense", False),
        (3, "silu", "float16 32", False),
        (2, "clamped_swiglu", "mxfp4 32", True),
    ],
)
def test_experts_equal_the_reference(rows: int, activation: Activation, kind: str, biases: bool) -> None:
    experts = make(2, activation, kind, biases=biases)
    x = draw(rows, HIDDEN, seed=5) * 5
    torch.testing.assert_close(feed_experts(x, experts), feed_experts_reference(x, experts), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the bits of the interpreter's products depend on the place of a row")
def test_the_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    experts = make(3, biases=True)
    x = draw(9, HIDDEN, seed=6)
    together = feed_experts(x, experts)
    for first, end in ((0, 1), (1, 3), (3, 9)):
        assert torch.equal(feed_experts(x[first:end], experts), together[first:end])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_activations_equal_the_reference(kind: Activation) -> None:
    gate_up = torch.randn(3, 2 * 37, generator=generator(8)) * 4
    torch.testing.assert_close(
        gated(*on_device(gate_up), kind).cpu(), gated_reference(gate_up, kind), rtol=1e-5, atol=1e-6
    )
