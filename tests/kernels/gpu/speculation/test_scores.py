"""Log-probabilities of a kernel against `speculation/distribution/distribution.py`; a row has the same bits anywhere."""

import pytest
import torch
from torch import Tensor

from paceline.core.output import TokenLogprobs
from paceline.kernels.gpu.speculation.scores import (
    COLUMNS,
    MAX_TOP,
    read_scores,
    score_rows,
    score_scratch,
    score_tokens,
)
from paceline.speculation.distribution.distribution import logprobs
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE, on_device

V = 5000  # two chunks, the last one partly filled


def make_logits(rows: int, width: int = V) -> Tensor:
    logits = torch.randn(rows, width, generator=generator(rows)) * 3
    logits[1::2] = logits[1::2].round()  # equal logits
    logits[:, 7] = -torch.inf
    return logits


def check(ours: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.token, mine.rank) == (theirs.token, theirs.rank)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        values = [[one.logprob, *(value for _, value in one.top)] for one in (mine, theirs)]
        assert torch.allclose(*map(torch.tensor, values), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("width", "top"), [(V, 5), (V, 0), (700, MAX_TOP)])
def test_values_ranks_and_best_tokens_are_those_of_the_reference(width: int, top: int) -> None:
    logits = make_logits(3, width)
    chosen = [int(logits[0].argmax()), width - 1, 0]
    check(score_rows(logits.to(DEVICE), chosen, top), logprobs(logits, chosen, top))


def test_fewer_tokens_than_are_wanted() -> None:
    logits = make_logits(2, 9)
    ours = score_rows(logits.to(DEVICE), [1, 2], MAX_TOP)
    assert [len(one.top) for one in ours] == [9, 9]
    check(ours, logprobs(logits, [1, 2], MAX_TOP))


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    logits = make_logits(4).to(DEVICE)
    together = score_rows(logits, [3, 1, 4, 1], 3)
    assert together == [
        one for i, token in enumerate([3, 1, 4, 1]) for one in score_rows(logits[i : i + 1], [token], 3)
    ]
    assert [one.top for one in together] == [one.top[:3] for one in score_rows(logits, [3, 1, 4, 1], 9)]


def test_committed_tokens_of_slots_that_want_them_are_scored() -> None:
    """Rows of two slots of a batch, three tokens each: one slot wants nothing, and one token is none."""
    logits = make_logits(8).to(DEVICE)
    num_top, slots = on_device(torch.tensor([4, -1, 2, 0], dtype=torch.int32), torch.tensor([2, 1]))
    rows, tokens = on_device(torch.tensor([5, 1, 6, 0, 0, 0]), torch.tensor([11, 12, -1, 4, 5, 6]))
    scratch, out = score_scratch(9, V, DEVICE), torch.full((6, COLUMNS), -7, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # the scratch memory can be used again
        score_tokens(logits, rows, tokens, num_top, 3, scratch, out, slots)
    assert (out[2:] == -7).all()
    assert read_scores(out.cpu().numpy(), [11, 12], 2) == score_rows(logits[[5, 1]], [11, 12], 2)
    assert not scratch.counters.any()
    score_tokens(logits, rows[:4], tokens[:4], num_top, 1, scratch, out)
    assert read_scores(out[3:4].cpu().numpy(), [4], 0) == score_rows(logits[:1], [4], 0)
