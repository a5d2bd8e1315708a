"""The same engine on a GPU: the same text as plain decoding there, and the same noise as on the CPU."""

import pytest
import torch

from paceline.core.request import Request
from paceline.speculation.proposers.suffix import NgramProposer
from paceline.speculation.rows.noise import NoiseKey, Purpose, gumbel
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import mixed_requests, plain_text
from tests.fakes import TINY, MixedDepth, draft_model, random_tree, run, tiny_engine, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROPOSERS = {
    "right": lambda: draft_model(tiny_model(device="cuda")),
    "sometimes": lambda: draft_model(tiny_model(perturb=0.3, device="cuda")),
    "tree": lambda: random_tree(TINY.vocab_size),
    "ngram": NgramProposer,
}


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_coupled_text_is_plain_text(proposer):
    model = tiny_model(device="cuda")
    requests: list[Request] = mixed_requests(12, TINY.vocab_size, max_tokens=40)
    engine = tiny_engine(model, PROPOSERS[proposer](), MixedDepth(6), max_batched_tokens=32)
    result = run(engine, requests)
    assert result.drafted > 0
    check_contract(differences(model, requests, plain_text(model, requests), result.tokens), is_bitwise=False)


def test_noise_is_that_of_the_cpu():
    keys = [NoiseKey(seed, 0, position) for seed in (1, 2**60) for position in (0, 5000)]
    for purpose in Purpose:
        ours = gumbel(keys, purpose, 50_000, torch.device("cpu"))
        theirs = gumbel(keys, purpose, 50_000, torch.device("cuda")).cpu()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
