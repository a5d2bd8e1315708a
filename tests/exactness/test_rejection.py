"""Rejection verification: the joint distribution of the text is the target's, through the engine, over up to 100,000 draws."""

import pytest

from paceline.core.request import SamplingParams
from tests.exactness.suite import check_distribution, next_logits
from tests.fakes import TINY, Sampled, draft_model, tiny_engine, tiny_model
from tests.heads import LayerSkip, eagle, medusa
from tests.specs import changed

DRAWS = (12_000, pytest.param(100_000, marks=pytest.mark.exact))
"""`make test` draws as often as the planted bug of test_planted_bugs.py that is hardest to find needs; `make test-exact` eight
times that."""
SMALL = changed(TINY, vocab_size=5)
PROMPT = (1, 3)

CASES = {
    "one-hot chain": ("one-hot", 1, {"temperature": 0.3}),
    "one-hot tree": ("one-hot", 2, {"temperature": 1.0, "top_k": 4}),
    "sparse chain": ("sparse", 1, {"temperature": 0.7, "top_k": 3}),
    "sparse tree": ("sparse", 2, {"temperature": 1.5, "top_p": 0.8}),
    "dense chain": ("dense", 1, {"temperature": 1.5}),
    "dense tree": ("dense", 3, {"temperature": 1.0, "top_p": 0.9}),
}


@pytest.fixture(scope="module")
def models():
    """A target whose law is far from flat, and a draft that is right about half of the time."""
    return tiny_model(config=SMALL, scale=1.2), tiny_model(config=SMALL, perturb=0.5, scale=1.2)


def engine_for(target, draft, kind, siblings, proposer=Sampled, depth=None):
    law = lambda output: next_logits(draft, (*PROMPT, *output))  # noqa: E731
    return tiny_engine(
        target,
        proposer(law, siblings, kind),
        depth=depth or (3 if siblings == 1 else 5),
        max_num_seqs=512,
        max_batched_tokens=8192,
        kv_tokens=16 * 1024,
    )


OFTEN = ("one-hot chain", "sparse chain", "dense chain", "dense tree")
"""Cases of `make test`: every kind of `q`, chains and trees; the others are in `make test-slow`."""


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_joint_of_four_tokens(models, case, draws):
    kind, siblings, sampling = CASES[case]
    check_distribution(
        models[0],
        lambda: engine_for(*models, kind, siblings),
        PROMPT,
        SamplingParams(**sampling),
        draws,
        extra=0 if siblings == 1 else 2,
    )


DRAFT = tiny_model(config=SMALL, perturb=0.5, scale=1.2)
HEADS = {
    "eagle": lambda target: eagle(target, num_blocks=1024, max_rows=8192, lanes=1024),
    "medusa": medusa,
    "layer_skip": lambda target: LayerSkip(1),
    "draft_model": lambda target: draft_model(DRAFT, num_blocks=1024, max_rows=8192, branches=4),
}
"""Trees of one-hot nodes, and chains with their own `q`; fewer draws, since each costs passes of a model."""


@pytest.mark.parametrize("method", HEADS)
def test_joint_with_heads(models, method):
    target = models[0]
    check_distribution(
        target,
        lambda: tiny_engine(
            target,
            HEADS[method](target),
            depth=5,
            max_num_seqs=512,
            max_batched_tokens=8192,
            kv_tokens=16 * 1024,
        ),
        PROMPT,
        SamplingParams(temperature=0.9, top_p=0.95),
        4_000,
        length=3,
        extra=2,
    )
