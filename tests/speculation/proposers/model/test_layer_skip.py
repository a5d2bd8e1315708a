import pytest
import torch

from paceline.core.errors import InvalidConfig
from paceline.core.request import SamplingParams
from paceline.kv.block_tables import BlockTables
from paceline.models.runner.runner import ModelRunner, Span, early_exit
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.model.layer_skip import LayerSkipProposer, exits
from paceline.speculation.proposers.suffix import NgramProposer
from tests.exactness.suite import check_identical, mixed_requests
from tests.fakes import TINY, run, tiny_engine, tiny_model
from tests.heads import LayerSkip

IDS = [7, 3, 22, 9, 14, 39, 0, 5, 5, 8, 31, 17, 2, 6, 28]


def test_with_all_layers_every_draft_is_accepted():
    model = tiny_model()
    engine = tiny_engine(model, LayerSkip(TINY.num_layers), depth=4)
    result = check_identical(model, engine, mixed_requests(8, TINY.vocab_size))
    assert result.drafted > 80
    assert result.accepted == result.drafted


def test_with_all_layers_rejection_accepts_every_draft():
    """p and q are equal: a rejection would show that the tokens were not drawn from q."""
    model = tiny_model()
    engine = tiny_engine(model, LayerSkip(TINY.num_layers), depth=4)
    result = run(engine, mixed_requests(8, TINY.vocab_size, verification="rejection"))
    assert result.drafted > 80
    assert result.accepted == result.drafted


def test_exits_are_compared_and_the_first_is_restored():
    tables = BlockTables(4, prefix_caching=False)
    proposer = LayerSkipProposer(ModelRunner(tiny_model(), 4), tables, 2)
    with exits(proposer) as choices:
        assert list(choices) == [1, 2]  # 25, 50 and 75 percent of two layers, and the exit that is set
        choices[1]()
        assert proposer.exit_layer == len(proposer.runner.model.layers) == 1
        assert proposer.traits.runners == (proposer.runner,)
    assert proposer.exit_layer == 2
    with exits(NgramProposer()) as choices:
        assert not choices


def test_weights_and_cache_are_shared():
    runner = ModelRunner(tiny_model(), 2)
    early = early_exit(runner, 1)
    assert early.model.layers == runner.model.layers[:1]
    assert early.cache[0][0].data_ptr() == runner.cache[0][0].data_ptr()
    assert len(early.cache) == 1
    assert runner.model.config.num_layers == 2  # untouched
    out = runner.forward([Span([0, 1], 0, IDS, 0)], state_layers=(1,))
    hidden = out.hidden_by_layer[1]
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + TINY.rms_eps).sqrt()
    logits = early.forward([Span([0, 1], len(IDS) - 1, IDS[-1:], 1)]).logits
    torch.testing.assert_close(logits, runner.model.logits(normed[-1:]), rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidConfig, match="after 3 layers"):
        early_exit(runner, 3)


def test_drafts_stay_within_the_reserved_slots():
    runner, tables = ModelRunner(tiny_model(), 4), BlockTables(4)
    proposer = LayerSkipProposer(runner, tables, 1)

    def drafts(ids, depth):
        params = SamplingParams(temperature=0.0)
        proposer.observe([SequenceProgress(0, ids, depth, params, 0, 0, 2, "coupled")])
        return proposer.collect([0], 0.0).counts

    assert drafts(IDS, 5) == ()  # no block table: not started, or preempted
    tables.open(0, IDS, "")
    tables.grow(0, len(IDS))
    before = [values.clone() for layer in runner.cache for values in layer]
    assert drafts(IDS, 0) == ()
    assert all(torch.equal(a, b) for a, b in zip(before, (v for layer in runner.cache for v in layer), strict=True))
    assert drafts(IDS, 5) == (1,)  # 16 slots, 15 tokens
    assert drafts([*IDS, 1], 5) == ()
    tables.grow(0, 20)
    assert drafts(IDS, 5) == (5,)
    second_layer = list(runner.cache[1])
    assert all((values == 0).all() for values in second_layer)
    proposer.close([0])
    proposer.close([0])
    assert proposer.collect([0], 0.0).counts == ()


class WrongSlot(LayerSkipProposer):
    """Writes one slot too early: over the last committed token."""

    def _span(self, progress, draft):
        right = super()._span(progress, draft)
        return Span(right.blocks, right.context_len - 1, right.tokens, right.num_logits)


def test_the_suite_detects_writes_to_committed_slots():
    model = tiny_model()
    engine = tiny_engine(model, lambda runner, tables: WrongSlot(runner, tables, 1), depth=4)
    with pytest.raises(AssertionError):
        check_identical(model, engine, mixed_requests(8, TINY.vocab_size))
