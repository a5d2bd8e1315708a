"""Branches ranked on the device against `speculation/trees/growth.py`."""

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.kernels.gpu.speculation.ranking import rank_rows, rank_scratch
from paceline.speculation.rows.rows import RowContext
from paceline.speculation.trees.growth import RankRules
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE, stream_of

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=5)
TRUNCATED = SamplingParams(temperature=1.1, seed=5, top_k=9, top_p=0.8)


def rows_of(params: list[SamplingParams], each: int, level: int) -> list[RowContext]:
    return [
        RowContext(p, 5, choice, 20 + choice + level, [0] * (20 + choice), 3, ())
        for choice, p in enumerate(params)
        for _ in range(each)
    ]


@pytest.mark.parametrize(
    ("kind", "params", "each", "columns", "is_mapped"),
    [
        ("greedy", [GREEDY], 3, 50, True),
        ("sampled", [SAMPLED, GREEDY], 2, 50, True),
        ("sampled", [SAMPLED], 1, 2300, False),  # three chunks
        ("ranked", [TRUNCATED, SAMPLED], 2, 40, True),
    ],
)
def test_equals_the_host(kind, params, each, columns, is_mapped):
    level, count = 3, 5
    g = generator(columns)
    logits = 3 * torch.randn(len(params) * each, columns, generator=g)
    ids = torch.randperm(2 * columns, generator=g)[:columns] if is_mapped else None
    rows = rows_of(params, each, level)
    rules = RankRules.of(rows, [True] * len(rows), ids, logits)
    best, confidence = rules.best(logits, count)
    expected = best if ids is None else ids[best]

    scores, lookup = logits, ids
    if kind == "ranked":
        scores, kept = rules.truncated(logits)
        lookup = ids[kept]
    heat = torch.tensor([0.0 if p.is_greedy else p.temperature for p in params])
    streams = torch.tensor([stream_of(row.key) for row in rows[::each]])
    lengths = torch.tensor([len(row.ids) for row in rows[::each]], dtype=torch.int32)
    scratch = rank_scratch(len(rows), scores.shape[1], count, DEVICE)
    lookup = None if lookup is None else lookup.to(DEVICE)
    given = [tensor.to(DEVICE) for tensor in (heat, streams, lengths)]
    for _ in range(2):  # the scratch is reusable
        found = rank_rows(scores.to(DEVICE), lookup, kind, *given, level, scratch)
        is_possible = confidence > -torch.inf  # the order of impossible tokens is undefined
        assert found.tokens.cpu()[is_possible].tolist() == expected[is_possible].tolist()
        torch.testing.assert_close(found.confidence.cpu(), confidence, rtol=1e-4, atol=1e-4)


def test_equal_scores_and_impossible_tokens():
    logits = torch.full((1, 6), -torch.inf, device=DEVICE)
    logits[0, [4, 1]] = 2.0
    scratch = rank_scratch(1, 6, 4, DEVICE)
    nothing = torch.zeros(1, device=DEVICE)
    found = rank_rows(logits, None, "greedy", nothing, nothing, nothing, 0, scratch)
    assert found.tokens.tolist() == [[1, 4, 0, 2]]
    torch.testing.assert_close(found.confidence[0, :2].exp().cpu(), torch.tensor([0.5, 0.5]))
    assert found.confidence[0, 2:].tolist() == [-torch.inf] * 2
