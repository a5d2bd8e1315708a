"""Samples as rows of text for the trainer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.server.learning.sample_ring import LearningSample
from paceline.train.data.text_file import Text


def to_text(samples: Sequence[LearningSample], length: int, vocab_size: int) -> Text:
    """One row a sample, padded at the end, so that a token has the context that it had. A sample of more than `length` tokens
    gives several rows that end with its output. A draft learns to predict outputs only. Kinds are row numbers: the scores of
    an evaluation are then those of single rows."""
    rows = [window for sample in samples for window in windows(sample, length) if max(window[0]) < vocab_size]
    size = max((len(ids) for ids, _ in rows), default=1)
    ids, answer = torch.zeros(len(rows), size, dtype=torch.int32), torch.zeros(len(rows), size, dtype=torch.bool)
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        answer[row, start : len(tokens)] = True
    return Text(ids, answer, tuple(f"{row}" for row in range(len(rows))), answer)


def categories(samples: Sequence[LearningSample], length: int, vocab_size: int) -> list[str]:
    """The category of every row of `to_text`."""
    return [sample.category for sample in samples for window in windows(sample, length) if max(window[0]) < vocab_size]


def windows(sample: LearningSample, length: int) -> list[tuple[tuple[int, ...], int]]:
    """(token ids, index of the first output token) of every row of a sample; the oldest output first."""
    ids, prompt = (*sample.prompt, *sample.output), len(sample.prompt)
    found = []
    end = len(ids)
    while end > prompt:
        start = max(0, end - length)
        found.append((ids[start:end], max(1, prompt - start)))
        end = start
    return found[::-1]


def num_trained(text: Text) -> int:
    trained: Tensor = text.answer if text.trained is None else text.trained
    return int(trained.sum())
