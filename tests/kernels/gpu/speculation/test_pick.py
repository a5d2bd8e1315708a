"""Tokens sampled on the device against `speculation/distribution/distribution.py`."""

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.kernels.gpu.speculation.pick import pick, pick_greedy, pick_scratch
from paceline.kernels.gpu.speculation.pick_truncated import pick_truncated
from paceline.speculation.distribution import distribution
from paceline.speculation.rows.noise import NoiseKey
from paceline.speculation.rows.rows import RowContext
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE, stream_of

VOCABULARY = 2500  # three chunks, the last one partly filled


def make_rows(params: list[SamplingParams]) -> list[RowContext]:
    return [RowContext(p, 2**60 + 11 * i, i % 3, 17 * i, (), 0) for i, p in enumerate(params)]


def inputs(rows: list[RowContext]) -> tuple[Tensor, Tensor, Tensor]:
    """temperature, streams, positions."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
    streams = torch.tensor([stream_of(NoiseKey(row.seed, row.choice, row.position)) for row in rows])
    positions = torch.tensor([row.position for row in rows])
    return temperature.to(DEVICE), streams.to(DEVICE), positions.to(DEVICE)


def make_logits(rows: int, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> Tensor:
    logits = torch.randn(rows, vocabulary, generator=generator(rows)) * 3
    logits[1::3] = logits[1::3].masked_fill(torch.rand(vocabulary, generator=generator(1)) < 0.7, -torch.inf)
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 700])
def test_sampled_and_greedy_rows_in_one_batch(dtype: torch.dtype, vocabulary: int) -> None:
    temperatures = [1.0, 0.0, 0.7, 1e-3, 2.0, 0.3, 1.0]
    rows = make_rows([SamplingParams(temperature=t) for t in temperatures])
    logits = make_logits(len(rows), dtype, vocabulary)
    expected = distribution.pick(logits, rows)
    out = pick(logits.to(DEVICE), *inputs(rows))
    assert torch.equal(out.cpu(), expected)
    assert len(set(expected.tolist())) > 4


def test_large_logits_are_exact_at_low_temperature() -> None:
    """The maximum is subtracted first: 3,000 / 0.0005 in float32 would have steps of half a unit."""
    rows = make_rows([SamplingParams(temperature=0.0005)] * 16)
    logits = torch.randn(16, 700, generator=generator(5)) * 0.001 + 3000.0
    expected = distribution.pick(logits, rows)
    assert torch.equal(pick(logits.to(DEVICE), *inputs(rows)).cpu(), expected)


def test_a_single_row_of_a_wider_tensor_and_many_rows_of_long_chunks() -> None:
    rows = make_rows([SamplingParams(temperature=0.8)] * 17)
    logits = make_logits(17, vocabulary=5000)
    expected = distribution.pick(logits, rows)
    assert torch.equal(pick(logits.to(DEVICE), *inputs(rows)).cpu(), expected)
    wider = torch.cat((logits, logits), 1).to(DEVICE)[:1, :5000]
    assert torch.equal(pick(wider, *inputs(rows[:1])).cpu(), expected[:1])


def test_of_equal_logits_the_lowest_id_wins() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[0, [1023, 1024, 2400]] = 1.0
    logits[1, [2400, 2049]] = 1.0
    logits[2] = -torch.inf
    logits[3] = make_logits(1)[0].round()
    expected = torch.tensor([1023, 2049, 0, int(logits[3].argmax())])
    assert torch.equal(pick_greedy(logits.to(DEVICE)).cpu(), expected)
    rows = make_rows([SamplingParams(temperature=0.0)] * 4)
    assert torch.equal(pick(logits.to(DEVICE), *inputs(rows)).cpu(), expected)


def test_scratch_and_output_are_reusable() -> None:
    rows = make_rows([SamplingParams(temperature=1.0)] * 3)
    scratch = pick_scratch(5, VOCABULARY, DEVICE)
    for tensor in (scratch.maxima, scratch.scores):
        tensor.fill_(torch.nan)
    out = torch.full((3,), -7, device=DEVICE)
    for seed in range(2):
        logits = make_logits(3) + seed * torch.randn(3, VOCABULARY, generator=generator(seed))
        expected = distribution.pick(logits, rows)
        assert pick(logits.to(DEVICE), *inputs(rows), scratch, out) is out
        assert torch.equal(out.cpu(), expected)
        assert pick_greedy(logits.to(DEVICE), scratch, out) is out
        assert torch.equal(out.cpu(), logits.argmax(1))
        assert not scratch.counters.any()


TRUNCATED = [
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=1.5, min_p=0.01, top_k=100, top_p=0.5),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=3),
    SamplingParams(temperature=2.0, top_k=10_000),
    SamplingParams(temperature=1.0, top_p=1e-6),
]


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 9000])
def test_truncated_and_plain_rows_in_one_batch(vocabulary: int, is_coarse: bool) -> None:
    """Coarse logits tie at every boundary."""
    rows = make_rows(TRUNCATED * 3)
    logits = make_logits(len(rows), vocabulary=vocabulary)
    logits = logits.round() if is_coarse else logits
    expected = distribution.pick(logits, rows)
    params = [row.params for row in rows]
    limits = (
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
    )
    limits = tuple(limit.to(DEVICE) for limit in limits)
    out = pick_truncated(logits.to(DEVICE), *inputs(rows), *limits)
    assert torch.equal(out.cpu(), expected)
