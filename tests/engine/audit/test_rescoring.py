"""A text computed again: the picks it was made of, and whatever was put in their place."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.request import Request, SamplingParams
from paceline.engine.audit.rescoring import (
    FLOAT32_GAP,
    Difference,
    FinishedText,
    Rescored,
    Rescoring,
    computed_in,
    differences,
    rounding,
)
from paceline.kernels.cpu import native
from paceline.models.runner.runner import ModelRunner
from paceline.speculation.rows.rows import RowContext
from tests.exactness.suite import SAMPLINGS, next_logits
from tests.fakes import TINY, run, tiny_engine, tiny_model

MODEL = tiny_model()
PROMPT = tuple(range(3, 24))


def finished(**sampling: Any) -> FinishedText:
    engine = tiny_engine(MODEL)
    request = engine.validate(Request("r", PROMPT, SamplingParams(**{"max_tokens": 30, **sampling, "n": 1})))
    tokens, params = run(engine, [request]).tokens["r", 0], request.sampling
    return FinishedText(PROMPT, tuple(tokens), params, params.seed or 0)


def rescored(text: FinishedText, rows: int = 7) -> list[Rescored]:
    runner = ModelRunner(MODEL, 8)
    rescoring, parts = Rescoring(text, runner, range(7, -1, -1)), []
    while not rescoring.is_done:
        parts.append(rescoring.advance(rows))
    return parts


def wrong(text: FinishedText, rows: int = 7) -> list[Difference]:
    return [one for part in rescored(text, rows) for one in differences(part, torch.float32)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_plain_decoding_differs_nowhere(sampling: dict[str, Any], rows: int) -> None:
    text = finished(**sampling)
    parts = rescored(text, rows)
    assert tuple(token for part in parts for token in part.tokens) == text.output_ids
    assert [part.first + len(part.tokens) for part in parts][-1] == len(text.output_ids)
    assert wrong(text, rows) == []


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}])
def test_a_token_that_was_not_picked_is_found(sampling: dict[str, Any]) -> None:
    text = finished(**sampling)
    index = 11
    other = (text.output_ids[index] + 1) % TINY.vocab_size
    changed = replace(text, output_ids=(*text.output_ids[:index], other, *text.output_ids[index + 1 :]))
    first = wrong(changed)[0]
    assert (first.index, first.token, first.pick) == (index, other, text.output_ids[index])
    assert first.gap > FLOAT32_GAP
    assert not first.is_rounding


def test_a_seed_or_a_position_that_is_not_the_texts_is_found() -> None:
    text = finished(temperature=1.0, seed=4)
    assert len(wrong(replace(text, seed=5))) > 10
    assert len(wrong(replace(text, choice=1))) > 10


def one_row(logits: list[float], token: int, **sampling: Any) -> list[Difference]:
    params = SamplingParams(**sampling)
    row = RowContext(params, 3, 0, 2, (1, 2), 2)
    return differences(Rescored(0, (token,), torch.tensor([logits]), (row,)), torch.float32)


def test_the_contract_covers_scores_that_are_as_good_as_equal() -> None:
    (near,) = one_row([1.0, 1.0 - 5e-5, 0.0], 1, temperature=0.0)
    assert near.is_rounding
    assert near.gap == pytest.approx(5e-5, rel=0.01)
    (far,) = one_row([1.0, 1.0 - 3e-4, 0.0], 1, temperature=0.0)
    assert not far.is_rounding


def test_the_contract_covers_the_edge_of_a_truncation() -> None:
    """Token 1 is kept if its logit is slightly higher, and the noise then makes it the pick."""
    logits = [1.0, 0.5 - 2e-5, 0.5]
    kept = one_row([1.0, 0.5 + 2e-5, 0.5], 1, temperature=5.0, top_k=2)
    if kept:  # the noise of this seed does not pick it: the test would show nothing
        pytest.fail("choose another seed")
    (edge,) = one_row(logits, 1, temperature=5.0, top_k=2)
    assert edge.is_rounding
    assert edge.gap == float("inf")
    (outside,) = one_row([1.0, 0.3, 0.5], 1, temperature=5.0, top_k=2)
    assert not outside.is_rounding


def test_rounding_of_fewer_bits() -> None:
    logits = torch.tensor([20.0, -3.0, -torch.inf])
    assert rounding(logits, torch.float32) == FLOAT32_GAP
    assert rounding(logits, torch.bfloat16) == 2 * 0.125  # one step of values from 16 to 32, for each of the two
    assert rounding(logits, torch.float16) == rounding(logits, torch.bfloat16) / 8
    assert rounding(logits, None) == 0.0


def test_passes_of_the_native_kernels_leave_no_room_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, eight_bit = ModelRunner(MODEL, 1), ModelRunner(MODEL, 1, torch.float8_e4m3fn)
    monkeypatch.setattr(native, "available", lambda: True)
    assert computed_in(whole) is computed_in(eight_bit) is None
    row = RowContext(SamplingParams(temperature=0.0), 3, 0, 2, (1, 2), 2)
    (found,) = differences(Rescored(0, (1,), torch.tensor([[0.5, 0.5 - 1e-7]]), (row,)), computed_in(whole))
    assert not found.is_rounding
    monkeypatch.setattr(native, "available", lambda: False)
    assert computed_in(whole) == torch.float32
    assert computed_in(eight_bit) == torch.bfloat16


def test_it_is_a_plain_pass() -> None:
    text = finished(temperature=0.0)
    part = rescored(text, 100)[0]
    assert torch.equal(part.logits[5], next_logits(MODEL, text.ids[: len(PROMPT) + 5]))
