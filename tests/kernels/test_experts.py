import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.experts import feed_experts, feed_experts_reference, route, route_reference
from paceline.kernels.formats.activation import Activation
from paceline.kernels.formats.experts import Experts, Routing, Scoring
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import quantize
from paceline.kernels.formats.weights import Dense, Weight
from paceline.kernels.linear import prepare
from tests.kernels.cases import generator, needs_native

pytestmark = needs_native
EXPERTS, HIDDEN, INNER = 6, 64, 96


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)) * 0.3


def make(
    routing: Routing, activation: Activation = "silu", *, biases: bool = False, kind: str = "bfloat16"
) -> tuple[Experts, Experts]:
    """The same experts for the native kernel and for the reference."""
    router = draw(EXPERTS, HIDDEN, seed=0)
    matrices = [draw(EXPERTS * 2 * INNER, HIDDEN, seed=1), draw(EXPERTS * HIDDEN, INNER, seed=2)]
    stored: list[Weight] = [Dense(matrix.bfloat16()) for matrix in matrices]
    if kind == "int8":
        stored = [quantize(matrix, "int8") for matrix in matrices]
    vectors = [draw(len(matrix), seed=3) for matrix in (router, *matrices)] if biases else [None] * 3
    packed = [prepare(Dense(router), "cpu", torch.float32), *(prepare(one, "cpu", torch.float32) for one in stored)]
    dense = [DenseWeight(router), *(DenseWeight(one.dequantize()) for one in stored)]
    return Experts(routing, activation, *packed, *vectors), Experts(routing, activation, *dense, *vectors)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_routing_equals_the_reference(is_normalized: bool, scoring: Scoring, groups: tuple[int, int]) -> None:
    logits = torch.randn(40, 20, generator=generator(4)) * 3
    logits[:, 7] = logits[:, 3]  # equal logits: the first expert comes first
    logits[5] = 0.0
    routing = Routing(20, 6, is_normalized, scoring, 1.0, *groups)
    (ids, weights), (expected_ids, expected) = route(logits, routing), route_reference(logits, routing)
    assert torch.equal(ids, expected_ids)
    assert ids[5].tolist() == [0, 1, 2, 3, 4, 5]
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    assert (weights.sum(1) < 1).all() or is_normalized or scoring == "sigmoid"


def test_a_bias_chooses_experts_and_does_not_weigh_them() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.2, -0.1, 0.3])
    routing = Routing(4, 2, is_normalized=True, scoring="sigmoid", scale=2.5)
    for found in (route(logits, routing, bias), route_reference(logits, routing, bias)):
        assert found[0].tolist() == [[3, 1]]
        assert found[1].tolist() == [[1.25, 1.25]]


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_native_equals_the_reference(rows: int, biases: bool, activation: Activation) -> None:
    experts, reference = make(Routing(EXPERTS, 2, is_normalized=True), activation, biases=biases)
    assert experts.address is not None
    x = torch.randn(rows, HIDDEN, generator=generator(5))
    torch.testing.assert_close(feed_experts(x, experts), feed_experts_reference(x, reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(threads: int, kind: str) -> None:
    experts, _ = make(Routing(EXPERTS, 3, is_normalized=True), biases=True, kind=kind)
    assert isinstance(experts.gate_up, PackedWeight)
    x = torch.randn(530, HIDDEN, generator=generator(6))  # more than the kernel computes at once
    native.set_num_threads(threads)
    together = feed_experts(x, experts)
    for first, end in ((0, 1), (1, 2), (2, 9), (9, 30), (511, 530)):
        assert torch.equal(feed_experts(x[first:end].contiguous(), experts), together[first:end])


def test_widths_that_split_a_tile_are_rejected() -> None:
    shapes = (3, 20), (3 * 10, 20), (3 * 20, 5)
    weights = [prepare(Dense(draw(*shape, seed=0)), "cpu", torch.float32) for shape in shapes]
    with pytest.raises(UnsupportedModel, match="multiples of 32"):
        Experts(Routing(3, 1, is_normalized=True), "silu", *weights)
