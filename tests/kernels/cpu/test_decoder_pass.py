"""A whole pass in one native call has the bits of a pass in parts."""

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.cpu.decoder import Sampler
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.distribution.distribution import pick
from paceline.speculation.rows.noise import Purpose, stream
from paceline.speculation.rows.rows import RowContext
from tests.fakes import tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels")
SPANS = [
    Span([1, 2], 0, [5, 6, 7, 8], 2),
    Span([3], 0, [9, 10, 11], 3, [0, 1, 1], [1, 3, 5]),
    Span([4], 2, [3], 1),
]
CHOICES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.5, min_p=0.05),
]


def test_a_pass_has_the_bits_of_its_parts() -> None:
    runner = ModelRunner(tiny_model(), 8)
    layers = (0, 1, runner.model.config.num_layers)
    whole = runner.forward(SPANS, layers, last_hidden=True)
    parts = runner.forward(SPANS, layers, True, lambda layer: None)
    assert runner.can_pick
    assert whole.logits is not None
    assert parts.logits is not None
    assert torch.equal(whole.logits, parts.logits)
    assert torch.equal(whole.last_hidden, parts.last_hidden)  # type: ignore[arg-type]
    assert set(whole.hidden_by_layer) == set(layers)
    assert all(torch.equal(whole.hidden_by_layer[layer], parts.hidden_by_layer[layer]) for layer in layers)


@pytest.mark.parametrize("shift", range(4))
def test_picks_are_those_of_the_logits(shift: int) -> None:
    runner = ModelRunner(tiny_model(), 8)
    params = [CHOICES[(i + shift) % 4] for i in range(3)]
    samplers = [Sampler(one, stream(Purpose.SHARED, 7 + i, i)) for i, one in enumerate(params)]
    picks = runner.forward(SPANS, samplers=samplers).sampled_tokens
    positions = [(0, 2), (0, 3), (1, 0), (1, 1), (1, 1), (2, 2)]  # sequence and rotary position of the rows with logits
    rows = [RowContext(params[s], 7 + s, s, position + 1, [], 0) for s, position in positions]
    logits = runner.forward(SPANS).logits
    assert logits is not None
    assert picks == pick(logits, rows).tolist()


def test_rows_outside_the_tables_are_refused() -> None:
    runner = ModelRunner(tiny_model(), 8)
    for span in (Span([0], 0, [-1], 1), Span([0], 0, [1 << 20], 1), Span([0], 0, [1], 1, [1 << 20])):
        with pytest.raises(IndexError):
            runner.forward([span])
