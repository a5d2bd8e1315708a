"""Heads on a GPU: the text is that of plain decoding, and the trees are those the CPU grows."""

import pytest
import torch

from tests import public_heads
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import mixed_requests, plain_text
from tests.exactness.test_public_heads import FORMS
from tests.fakes import TINY, MixedDepth, run, tiny_engine, tiny_model
from tests.heads import LayerSkip, distilled, eagle, medusa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROPOSERS = {
    "eagle": lambda model: eagle(model, reduced=24),
    "medusa": lambda model: medusa(model, reduced=24),
    "distilled": lambda model: distilled(model, reduced=24),
    "layer_skip": lambda model: LayerSkip(1),
}


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_coupled_text_is_plain_text(proposer):
    model = tiny_model(device="cuda")
    requests = mixed_requests(12, TINY.vocab_size, max_tokens=40)
    engine = tiny_engine(model, PROPOSERS[proposer](model), MixedDepth(14), max_batched_tokens=64)
    result = run(engine, requests)
    assert result.drafted > 0
    check_contract(differences(model, requests, plain_text(model, requests), result.tokens), is_bitwise=False)


@pytest.mark.parametrize("method", ["eagle", "medusa", "distilled"])
def test_as_many_are_accepted_as_on_the_cpu(method):
    """In float32 both grow the same trees but for rounding, and so accept about the same."""
    accepted = []
    for device in ("cpu", "cuda"):
        model = tiny_model(device=device)
        engine = tiny_engine(model, PROPOSERS[method](model), depth=14, max_batched_tokens=128)
        accepted.append(run(engine, mixed_requests(16, TINY.vocab_size, max_tokens=40)).accepted)
    assert accepted[0] > 10
    assert abs(accepted[1] - accepted[0]) <= 0.1 * accepted[0]


@pytest.mark.parametrize("name", FORMS)
def test_text_with_a_published_head_is_plain_text(name: str) -> None:
    model = public_heads.target("cuda")
    requests = mixed_requests(12, TINY.vocab_size, max_tokens=40)
    engine = tiny_engine(model, public_heads.public_proposer(name, model), MixedDepth(14), max_batched_tokens=64)
    result = run(engine, requests)
    assert result.drafted > 0
    check_contract(differences(model, requests, plain_text(model, requests), result.tokens), is_bitwise=False)


@pytest.mark.parametrize("name", FORMS)
def test_as_many_of_a_published_head_are_accepted_as_on_the_cpu(name: str) -> None:
    accepted = []
    for device in ("cpu", "cuda"):
        model = public_heads.target(device)
        engine = tiny_engine(model, public_heads.public_proposer(name, model), depth=4, max_batched_tokens=128)
        accepted.append(run(engine, mixed_requests(16, TINY.vocab_size, max_tokens=40)).accepted)
    assert abs(accepted[1] - accepted[0]) <= 3 + 0.1 * accepted[0]
