"""Biases of logits, also many of them in every row of a draft."""

from collections.abc import ItemsView, Iterator, Mapping

import numpy as np
import torch

from paceline.core.request import SamplingParams
from paceline.speculation.rows.rows import RowContext, process

VOCAB = 64


class CountedBias(Mapping[int, float]):
    """Counts how often all biases are read."""

    def __init__(self, values: dict[int, float]) -> None:
        self._values, self.reads = values, 0

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[int, float]:
        self.reads += 1
        return self._values.items()


def rows(params: SamplingParams, count: int) -> list[RowContext]:
    return [RowContext(params, 1, 0, 2 + i, (1, 2), 2, (3,) * i) for i in range(count)]


def test_biases_are_added_to_tokens_of_the_vocabulary() -> None:
    logits = torch.arange(2.0 * VOCAB).reshape(2, VOCAB)
    result = process(logits, rows(SamplingParams(logit_bias={3: 2.5, VOCAB - 1: -100.0, VOCAB + 7: 1.0}), 2))
    expected = logits.clone()
    expected[:, 3] += 2.5
    expected[:, VOCAB - 1] -= 100.0
    assert torch.equal(result, expected)
    assert torch.equal(logits, torch.arange(2.0 * VOCAB).reshape(2, VOCAB))


def test_the_rows_of_a_draft_read_their_biases_once() -> None:
    """A request may have thousands: other sequences of the batch wait while they are read."""
    bias = CountedBias(dict.fromkeys(range(VOCAB), -1.0))
    params = SamplingParams(logit_bias=bias)
    bias.reads = 0
    process(torch.zeros(1, VOCAB), rows(params, 1))
    once, bias.reads = bias.reads, 0
    process(torch.zeros(9, VOCAB), rows(params, 9))
    assert bias.reads == once


def test_penalties_are_rounded_to_float32_and_subtracted_once() -> None:
    """The arithmetic that kernels repeat: every number here is not a float32."""
    logits = torch.linspace(-3.0, 3.0, VOCAB).reshape(1, VOCAB) * 1.7
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.7)
    row = RowContext(params, 1, 0, 9, (60, 1, 5, 60, 60), 2, (60, 7))
    expected = logits[0].numpy().copy()
    for token in (60, 1, 5, 7):  # prompt, output and drafts
        value = expected[token]
        expected[token] = value / np.float32(1.3) if value > 0 else value * np.float32(1.3)
    for token, count in ((60, 3), (5, 1), (7, 1)):  # output and drafts
        amount = np.float64(np.float32(0.3)) + count * np.float64(np.float32(0.7))
        expected[token] = expected[token] - np.float32(amount)
    assert process(logits, [row])[0].numpy().tobytes() == expected.tobytes()
