"""The bits of a row do not depend on the number of rows, and a kernel that breaks the order of sums is noticed."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.formats.linear import DenseWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COUNTS = (2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 256, 511, 512, 577, 1024, 2048)
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "down": (4096, 14336), "narrow": (576, 1536)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def differing(function: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...] = COUNTS) -> list[int]:
    """Numbers of rows for which any row has other bits than in the largest pass."""
    whole = function(x[: max(counts)].contiguous())
    return [count for count in counts if not torch.equal(function(x[:count].contiguous()), whole[:count])]


@pytest.fixture
def in_one_part() -> Iterator[None]:
    from paceline.kernels.gpu.products import sum_in_one_part

    sum_in_one_part()
    yield
    sum_in_one_part()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("in_one_part")
def test_products(shape: str, out_dtype: torch.dtype) -> None:
    from paceline.kernels.gpu.products import product

    outputs, inputs = SHAPES[shape]
    x, weight = draw(max(COUNTS), inputs), DenseWeight(draw(outputs, inputs, seed=1))
    assert not differing(lambda rows: product(rows, weight, out_dtype=out_dtype), x, (1, *COUNTS))


@pytest.mark.usefixtures("in_one_part")
def test_a_library_that_splits_k_is_noticed() -> None:
    from paceline.kernels.gpu.products import compare

    outputs, inputs = SHAPES["down"]
    weight = DenseWeight(draw(outputs, inputs, seed=1))

    def unequal() -> list[int]:
        """Numbers of rows for which the library has other bits. Its version decides where it splits."""
        counts = 48, 64, 96, 128, 192, 256
        return [count for count in counts if not compare(draw(count, inputs), weight, None, torch.bfloat16)]

    in_one_part = unequal()
    torch.backends.cuda.preferred_blas_library("cublas")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, True)
    assert set(unequal()) - set(in_one_part)
    assert differing(lambda rows: dense_linear(rows, weight.values), draw(2048, inputs), (33, 64, 128, 2048))


def test_a_tile_that_splits_k_is_noticed() -> None:
    from paceline.kernels.gpu.linear import linear
    from paceline.kernels.gpu.tiles import Tile

    outputs, inputs = SHAPES["down"]
    weight = DenseWeight(draw(outputs, inputs, seed=1))

    def splitting(splits: int) -> Callable[[Tensor], Tensor]:
        return lambda x: linear(x, weight, tile=Tile(64, 128, 4, 4, splits=splits if len(x) > 16 else 1))

    assert not differing(splitting(1), draw(64, inputs), (1, 16, 17, 64))
    assert differing(splitting(2), draw(64, inputs), (1, 16, 17, 64)) == [1, 16]


def test_squares_of_the_norm() -> None:
    """Tiles of a product leave the sums of strips of other widths. float32 sums of these strips differ."""
    from paceline.kernels.gpu.linear import add_linear
    from paceline.kernels.gpu.tiles import Tile

    weight, x, residual = DenseWeight(draw(4096, 1024, seed=1)), draw(64, 1024), draw(64, 4096, seed=2)
    norm = draw(4096, seed=3)

    def squares(outputs: int) -> Tensor:
        return add_linear(x, weight, residual, norm, 1e-5, Tile(outputs, 128, 4, 4))[1].squares

    assert torch.equal(squares(16).sum(1), squares(64).sum(1))
    hidden = add_linear(x, weight, residual, norm, 1e-5)[0].float()
    in_strips = [hidden.square().view(64, -1, width).sum(2).sum(1) for width in (16, 64)]
    assert not torch.equal(*in_strips)


@pytest.mark.usefixtures("in_one_part")
@pytest.mark.parametrize("is_planted", [False, True])
def test_experts(is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the order of a row's experts depends on the number of rows, as with atomics. The sum is in float32, so that
    this shows in float32 outputs; bf16 rounds it away nearly always."""
    from paceline.kernels.formats.experts import Experts, Routing
    from paceline.kernels.gpu.experts import feed

    num_experts, width, inner = 32, 1024, 512
    experts = Experts(
        Routing(num_experts, per_token=4, is_normalized=True),
        "silu",
        DenseWeight(draw(num_experts, width, seed=1)),
        DenseWeight(draw(num_experts * 2 * inner, width, seed=2) / 32),
        DenseWeight(draw(num_experts * width, inner, seed=3) / 32),
    )
    if is_planted:
        route = feed.route

        def turned(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
            ids, weights = route(logits, routing)
            return (ids, weights) if len(logits) > 16 else (ids.flip(1).contiguous(), weights.flip(1).contiguous())

        monkeypatch.setattr(feed, "route", turned)
    counts = (1, 3, 8, 9, 16, 17, 64, 65, 128, 513, 1024)
    x = draw(1024, width).float() if is_planted else draw(1024, width)
    found = differing(lambda rows: feed.feed_experts(rows, experts), x, counts)
    assert found == ([1, 3, 8, 9, 16] if is_planted else [])
