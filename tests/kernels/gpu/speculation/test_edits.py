"""Logits that kernels modify against `process` of `speculation/rows/rows.py`: bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.kernels.gpu.speculation import edits
from paceline.kernels.gpu.speculation.edits import IN_PROMPT, DraftedRows, EditTensors, count_tokens, edit_logits
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.rows.rows import RowContext, process, row_contexts
from paceline.speculation.verification.tree import ancestors
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE, on_device

V = 2500  # two chunks, the last one partly filled
PLAIN = SamplingParams()
PARAMS = [
    PLAIN,
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.3, frequency_penalty=-0.7),
    SamplingParams(logit_bias={0: 0.1, 7: -100.0, V - 1: 2.3, V - 2: 1e-3}),
    SamplingParams(min_tokens=9, blocked_ids=(0, 3, V - 1)),
    SamplingParams(
        repetition_penalty=0.7,
        presence_penalty=-0.1,
        frequency_penalty=0.3,
        logit_bias={token: 0.1 * token - 3.0 for token in range(0, 60, 2)},
        min_tokens=6,
        blocked_ids=(2, 4),
    ),
]


def row_of(params: SamplingParams, number: int) -> RowContext:
    """A text of 5 prompt tokens and some output, with repetitions."""
    ids = [(3 * number + 7 * j) % 11 for j in range(8 + number)]
    ids[-1] = V - 1
    return RowContext(params, 0, 0, len(ids), ids, 5)


def tensors(rows: list[RowContext]) -> EditTensors:
    """Slots with these contents."""
    count = len(rows)

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    params = [row.params for row in rows]
    biased, blocked = (torch.full((count, most), -1, dtype=torch.int32) for most in (512, 64))
    biases, seen = torch.full((count, 512), torch.nan), torch.zeros(count, V, dtype=torch.int32)
    for slot, row in enumerate(rows):
        bias = row.params.logit_bias
        biased[slot, : len(bias)] = torch.tensor([*bias], dtype=torch.int32)
        biases[slot, : len(bias)] = torch.tensor([*bias.values()])
        blocked[slot, : len(row.params.blocked_ids)] = torch.tensor(row.params.blocked_ids, dtype=torch.int32)
        seen[slot, row.ids[: row.num_prompt]] = IN_PROMPT
        for token in row.ids[row.num_prompt :]:
            seen[slot, token] += 1
    numbers = (
        column([p.repetition_penalty for p in params], torch.float32),
        column([p.presence_penalty for p in params], torch.float32),
        column([p.frequency_penalty for p in params], torch.float32),
        column([row.num_prompt + row.params.min_tokens for row in rows], torch.int32),
        column([len(p.logit_bias) for p in params], torch.int32),
        column([len(p.blocked_ids) for p in params], torch.int32),
    )
    return EditTensors(*on_device(*numbers, biased, biases, blocked, seen))


def make_logits(rows: int) -> Tensor:
    logits = torch.randn(rows, V, generator=generator(rows)) * 3
    logits[:, 5] = -torch.inf
    logits[:, 9] = 0.0
    return logits


def positions(rows: list[RowContext]) -> Tensor:
    return torch.tensor([row.position for row in rows]).to(DEVICE)


def same_bits(ours: Tensor, expected: Tensor) -> bool:
    return torch.equal(ours.cpu().view(torch.int32), expected.view(torch.int32))


def test_every_modification_has_the_bits_of_the_reference() -> None:
    rows = [row_of(params, i) for i, params in enumerate(PARAMS)]
    logits, held = make_logits(len(rows)), tensors(rows)
    ours = logits.to(DEVICE, copy=True)
    edit_logits(ours, positions(rows), held)
    assert same_bits(ours, process(logits, rows))
    assert torch.equal(ours[0].cpu(), logits[0])
    # Rows in any order, of a wider tensor
    order = torch.tensor([4, 2, 2, 5])
    wide = torch.cat((logits, logits), 1)[order].to(DEVICE)
    edit_logits(wide[:, :V], positions([rows[i] for i in order]), held, order.to(DEVICE))
    assert same_bits(wide[:, :V], process(logits[order], [rows[i] for i in order]))
    assert torch.equal(wide[:, V:].cpu(), logits[order])


def drafted(rows: list[RowContext], draft: Draft) -> list[RowContext]:
    """The rows of every sequence with this draft."""

    class Facts:
        def __init__(self, row: RowContext) -> None:
            self.ids, self.num_prompt, self.sampling = row.ids, row.num_prompt, row.params
            self.seed = self.choice = 0

    return [each for row in rows for each in row_contexts(Facts(row), draft)]


TREE = Draft((6, 1, 6, 2000, 6, 6), (-1, -1, 0, 0, 2, 1))
CHAIN = Draft((6, 1, 6, 2000, 6), (-1, 0, 1, 2, 3))


@pytest.mark.parametrize("draft", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_before_a_row_count_as_output(draft: Draft) -> None:
    some = [row_of(params, i) for i, params in enumerate(PARAMS)][1:]
    rows, each = drafted(some, draft), 1 + len(draft)
    logits = make_logits(len(rows))
    tokens = torch.tensor([draft.tokens] * len(some)).to(DEVICE)
    masks = None
    if not draft.is_chain:
        masks = torch.tensor(ancestors(draft.parents) * len(some)).to(DEVICE)
    ours = logits.to(DEVICE, copy=True)
    paths = DraftedRows(tokens, each, len(rows), ancestors=masks)
    edit_logits(ours, positions(rows), tensors(some), each=each, drafted=paths)
    assert same_bits(ours, process(logits, rows))
    # The same rows, of slots that are given, in front of a row without drafts
    order = torch.tensor([3, 1])
    chosen = [row for i in order for row in rows[i * each : (i + 1) * each]] + [some[0]]
    slots = torch.cat((order.repeat_interleave(each), torch.tensor([0]))).to(DEVICE)
    if masks is not None:
        masks = masks[: len(chosen)]
    ours = logits[: len(chosen)].to(DEVICE, copy=True)
    paths = DraftedRows(tokens, each, len(chosen) - 1, ancestors=masks)
    edit_logits(ours, positions(chosen), tensors(some), slots, drafted=paths)
    assert same_bits(ours, process(logits[: len(chosen)], chosen))


def test_rows_of_a_draft_model_have_the_drafts_before_them() -> None:
    """One row of each sequence, after two drafts; the draft knows fewer tokens than the target."""
    some = [row_of(params, i) for i, params in enumerate(PARAMS)]
    rows = [replace(row, position=row.position + 2, path=(6, 1)) for row in some]
    known = V - 400
    logits = make_logits(len(rows))[:, :known]
    tokens = torch.tensor([[6, 1, -7, -7]] * len(some)).to(DEVICE)
    ours = logits.to(DEVICE, copy=True)
    edit_logits(ours, positions(rows), tensors(some), drafted=DraftedRows(tokens, 1, len(rows), first=2))
    in_vocabulary = [replace(row, ids=[i for i in row.ids if i < known], params=cut(row.params, known)) for row in rows]
    assert same_bits(ours, process(logits, in_vocabulary))


def cut(params: SamplingParams, known: int) -> SamplingParams:
    return replace(
        params,
        logit_bias={token: bias for token, bias in params.logit_bias.items() if token < known},
        blocked_ids=tuple(token for token in params.blocked_ids if token < known),
    )


def test_committed_tokens_are_counted_where_penalties_read_them() -> None:
    rows = [row_of(params, i) for i, params in enumerate(PARAMS)]
    held = tensors(rows)
    before = held.seen.clone()
    tokens = torch.tensor([[4, 4, 9, -1]] * len(rows))
    tokens[2] = -1
    count_tokens(tokens.to(DEVICE), held)
    count_tokens(torch.tensor([[4], [V - 1]]).to(DEVICE), held, torch.tensor([5, 1]).to(DEVICE))
    change = held.seen - before
    assert change[1].nonzero().flatten().tolist() == [4, 9, V - 1]
    assert change[1, [4, 9, V - 1]].tolist() == [2, 1, 1]
    assert change[5, [4, 9]].tolist() == [3, 1]
    assert not change[[0, 2, 3, 4]].any()
    assert (held.seen[1, 4] & 0x7FFFFFFF) == 2


def test_the_sizes_of_the_lists_are_those_of_the_kernels() -> None:
    assert (edits.MAX_BIASED, edits.MAX_BLOCKED) == (512, 64)
    everything = {token: 0.01 * token for token in range(512)}
    params = SamplingParams(logit_bias=everything, min_tokens=9, blocked_ids=tuple(range(64)))
    rows = [row_of(params, 1)]
    logits, ours = make_logits(1), make_logits(1).to(DEVICE)
    edit_logits(ours, positions(rows), tensors(rows))
    assert same_bits(ours, process(logits, rows))
