"""Coupled verification: the text with speculation is the text without, token for token, greedy and sampled."""

from collections.abc import Callable

import pytest

from paceline.core.request import SpeculationFlags
from paceline.speculation.proposer import Proposer
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.suffix import NgramProposer, SuffixProposer
from tests.exactness.suite import check_identical, mixed_requests, plain_text
from tests.fakes import (
    TINY,
    MixedDepth,
    StepClock,
    Unreliable,
    draft_model,
    random_chain,
    random_tree,
    tiny_engine,
    tiny_model,
)
from tests.heads import LayerSkip, distilled, eagle, medusa

VOCAB = TINY.vocab_size

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "right": lambda: draft_model(tiny_model()),
    "sometimes": lambda: draft_model(tiny_model(perturb=0.3)),
    "wrong": lambda: random_chain(VOCAB),
    "tree": lambda: random_tree(VOCAB),
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "lookahead": LookaheadProposer,
    "combined": lambda: CombinedProposer(
        {"ngram": NgramProposer(), "suffix": SuffixProposer()},
        {"draft_model": draft_model(tiny_model(0, 0.3))},
        StepClock(),
    ),
    "unreliable": lambda: Unreliable(draft_model(tiny_model(perturb=0.1))),
    "cramped": lambda: draft_model(tiny_model(perturb=0.1), num_blocks=6, max_rows=8),
    "model tree": lambda: draft_model(tiny_model(perturb=0.3), branches=4),
    "right model tree": lambda: draft_model(tiny_model(), branches=4),
    "cramped model tree": lambda: draft_model(tiny_model(perturb=0.1), num_blocks=6, max_rows=8, branches=4),
    "unreliable model tree": lambda: Unreliable(draft_model(tiny_model(perturb=0.1), branches=4)),
    "eagle": lambda: eagle(tiny_model(), reduced=24),
    "cramped eagle": lambda: eagle(tiny_model(), num_blocks=6, max_rows=8, lanes=3),
    "medusa": lambda: medusa(tiny_model(), reduced=24),
    "distilled": lambda: distilled(tiny_model(), reduced=24),
    "layer_skip": lambda: LayerSkip(1),
}


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_batches(target, proposer, batch):
    engine = tiny_engine(target, PROPOSERS[proposer](), depth=4, max_num_seqs=batch)
    check_identical(target, engine, mixed_requests(8, VOCAB))


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_depths_that_change_in_mid_flight(target, proposer):
    engine = tiny_engine(target, PROPOSERS[proposer](), MixedDepth(7))
    check_identical(target, engine, mixed_requests(10, VOCAB, seed=1))


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_preemption(target, proposer):
    engine = tiny_engine(target, PROPOSERS[proposer](), MixedDepth(5), kv_tokens=16 * 12, max_model_len=160)
    check_identical(target, engine, mixed_requests(12, VOCAB, seed=2, max_tokens=80))
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_chunked_prefill_and_prefix_hits(target, proposer):
    engine = tiny_engine(target, PROPOSERS[proposer](), depth=3, max_batched_tokens=11)
    requests = mixed_requests(16, VOCAB, seed=3)
    check_identical(target, engine, requests, arrivals=1)
    assert engine.scheduler.tables.pool.num_cached > 0


def test_a_right_draft_is_accepted(target):
    """The suite would pass with drafts that are never used: here they are, and every one is kept."""
    engine = tiny_engine(target, PROPOSERS["right"](), depth=4)
    result = check_identical(target, engine, mixed_requests(8, VOCAB))
    assert result.drafted > 80
    assert result.accepted == result.drafted


def test_a_tree_is_used(target):
    model = tiny_model()
    engine = tiny_engine(model, random_tree(8), depth=30, max_num_seqs=2)
    requests = mixed_requests(6, VOCAB, seed=5)
    assert check_identical(model, engine, requests).accepted > 0


def test_requests_choose(target):
    """Off, shallow and another rule, side by side in one batch; greedy text is the same under every rule."""
    plain = mixed_requests(8, VOCAB, seed=6, enabled=False)
    shallow = mixed_requests(8, VOCAB, seed=6, max_depth=1)
    for requests in (plain, shallow):
        engine = tiny_engine(target, PROPOSERS["right"](), depth=5)
        result = check_identical(target, engine, requests)
        assert (result.drafted > 0) == (requests is shallow)


def test_the_switch_flips_without_draining(target):
    requests = mixed_requests(8, VOCAB, seed=7)
    engine = tiny_engine(target, PROPOSERS["sometimes"](), depth=4)
    tokens = {(r.id, c): [] for r in requests for c in range(r.sampling.n)}
    for one in requests:
        engine.add(engine.validate(one))
    step = drafted_while_off = 0
    while engine.has_work:
        if step % 3 == 0:
            engine.flags.apply(SpeculationFlags(enabled=step % 2 == 0))
        for output in engine.step():
            tokens[output.request_id, output.choice].extend(output.tokens)
            drafted_while_off += 0 if engine.speculator.enabled else output.drafted
        step += 1
    assert drafted_while_off == 0
    assert tokens == plain_text(target, requests)
