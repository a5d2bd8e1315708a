"""Two drafts of the same shape exchange their weights; others are refused with the difference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.errors import IncompatibleDraft
from paceline.models.drafts.exchanges import AnyDraft, check_exchangeable, exchange, exchange_in_place, own_tensors
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.heads.medusa import MedusaModel
from paceline.models.runner.runner import ModelRunner, Span
from tests.fakes import tiny_model
from tests.heads import tiny_distilled, tiny_eagle, tiny_medusa

TARGET = tiny_model()
MAKERS: list[Callable[..., AnyDraft]] = [tiny_eagle, tiny_medusa, tiny_distilled]
EXCHANGES = [exchange, exchange_in_place]


def predictions(model: AnyDraft) -> torch.Tensor:
    """What the draft computes from fixed inputs."""
    states = torch.randn(3, TARGET.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        if isinstance(model, MedusaModel):
            return model.logits(states).clone()
        if isinstance(model, EagleModel):
            return model.logits(EagleRunner(model, 2, 1).forward([Span([0], 0, [1, 2, 3], 0)], states)).clone()
        logits = ModelRunner(model, 2).forward([Span([0], 0, [1, 2, 3], 3)]).logits
        assert logits is not None
        return logits.clone()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("way", EXCHANGES)
@pytest.mark.parametrize("reduced", [None, 24])
def test_each_draft_computes_what_the_other_did(
    make: Callable[..., AnyDraft], way: Callable[[AnyDraft, AnyDraft], None], reduced: int | None
) -> None:
    one, two = make(TARGET, seed=0, reduced=reduced), make(TARGET, seed=1, reduced=reduced)
    first, second = predictions(one), predictions(two)
    assert not torch.equal(first, second)
    check_exchangeable(one, two)
    way(one, two)
    assert torch.equal(predictions(one), second)
    assert torch.equal(predictions(two), first)
    way(one, two)
    assert torch.equal(predictions(one), first)


@pytest.mark.parametrize("make", MAKERS)
def test_in_place_keeps_the_memory_of_every_tensor(make: Callable[..., AnyDraft]) -> None:
    """A captured graph reads these addresses."""
    one, two = make(TARGET, seed=0), make(TARGET, seed=1)
    before = {name: tensor.data_ptr() for name, tensor in own_tensors(one).items()}
    exchange_in_place(one, two)
    assert before == {name: tensor.data_ptr() for name, tensor in own_tensors(one).items()}


@pytest.mark.parametrize("way", EXCHANGES)
def test_the_target_does_not_change(way: Callable[[AnyDraft, AnyDraft], None]) -> None:
    tokens = [Span([0], 0, [1, 2, 3], 3)]
    before = ModelRunner(TARGET, 2).forward(tokens).logits
    assert before is not None
    way(tiny_distilled(TARGET, seed=0), tiny_distilled(TARGET, seed=1))
    after = ModelRunner(TARGET, 2).forward(tokens).logits
    assert after is not None
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("one", "two", "difference"),
    [
        (tiny_eagle(TARGET), tiny_medusa(TARGET), "the kind of the draft in use is an EAGLE head, that of the new one Medusa"),
        (tiny_eagle(TARGET, reduced=24), tiny_eagle(TARGET, reduced=30), "tokens that it can propose .* is 24, .* 30"),
        (tiny_eagle(TARGET, reduced=24), tiny_eagle(TARGET), "tokens that it can propose .* is 24"),
    ],
)  # fmt: skip
def test_other_drafts_are_refused_with_the_difference(one: AnyDraft, two: AnyDraft, difference: str) -> None:
    with pytest.raises(IncompatibleDraft, match=difference):
        check_exchangeable(one, two)


def test_other_shapes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tiny_eagle(TARGET), tiny_eagle(TARGET)
    wider: Any = torch.ones(2 * TARGET.config.hidden_size)
    monkeypatch.setattr(two, "final_norm", wider)
    with pytest.raises(IncompatibleDraft, match=r"final_norm of the draft in use is .* float32, that of the new one"):
        check_exchangeable(one, two)
    heads, fewer = tiny_medusa(TARGET), tiny_medusa(TARGET)
    monkeypatch.setattr(fewer, "config", replace(fewer.config, num_heads=1))
    with pytest.raises(IncompatibleDraft, match="num_heads of the draft in use"):
        check_exchangeable(heads, fewer)
