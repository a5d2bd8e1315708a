"""The tree that the head grows in its lanes is the one that plain torch grows, every path computed from scratch."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.speculation.drafts.drafts import DraftPrefill, depths
from paceline.speculation.proposer import HiddenRows, SequenceProgress
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.eagle.eagle_trees import BRANCHES, LEVELS, WIDTH
from paceline.speculation.trees.growth import Growth, draft_row, rank
from tests.exactness.suite import mixed_requests
from tests.fakes import TINY, MixedDepth, run, tiny_engine, tiny_model
from tests.heads import draft_config, draft_tensors, eagle, eagle_model
from tests.models.reference_heads import eagle_logits, target_states
from tests.traffic import CHAT

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS = [int(token) for token in torch.randint(0, 40, (64,), generator=torch.Generator().manual_seed(0))]
TARGET = tiny_model()
CONFIG = draft_config(TARGET, "eagle")
TENSORS = draft_tensors(CONFIG, reduced=24)
LAYERS = tuple(CONFIG["capture"])


@pytest.fixture(params=["natively", "level by level", "on the device"], autouse=True)
def growth(request, monkeypatch):
    """All ways to grow give the same trees."""
    if request.param == "level by level":
        monkeypatch.setattr(EagleModel, "native", lambda _head, _cache: None)
    init = EagleProposer.__init__

    def chosen(self, *arguments):
        init(self, *arguments)
        self.grows_on_device = request.param == "on the device"

    monkeypatch.setattr(EagleProposer, "__init__", chosen)


def proposer(num_blocks=64, max_rows=64, lanes=32):
    model = eagle_model(CONFIG, TENSORS, TARGET)
    return EagleProposer(EagleRunner(model, num_blocks, lanes), max_rows)


def progress(ids, depth, start=0, end=None, sequence_id=0, hidden=True, rule="coupled", salt="", **sampling):
    """Progress with the first `end` tokens of `ids` committed, and states from `start` up to the newest token."""
    ids = ids[: end or len(ids)]
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    states = None
    if hidden:
        inner, _ = target_states(TARGET, ids, LAYERS)
        states = HiddenRows(start, {layer: inner[layer][start : len(ids) - 1] for layer in LAYERS}, None)
    return SequenceProgress(sequence_id, ids, depth, params, params.seed or 0, 0, 2, rule, salt, states)


def reference(p, slots=None, width=WIDTH):
    """Tokens and parents of the tree, computed from scratch over these committed slots."""
    slots = range(len(p.ids) - 1) if slots is None else slots
    inner, _ = target_states(TARGET, p.ids, LAYERS)
    features = torch.cat([inner[layer] for layer in LAYERS], 1)[list(slots)]
    vocabulary = proposer()._model.vocabulary
    tree = Growth(p.depth, p.max_levels)

    def grow(node):
        path = tree.path(node)
        logits = eagle_logits(TENSORS, CONFIG, TARGET, features, slots, p.ids, path)
        coupled = [p.verification == "coupled"]
        (branches,) = rank(logits[None], [draft_row(p, path)], coupled, vocabulary, min(BRANCHES, p.depth))
        tree.add(node, branches)

    grow(-1)
    for level in range(1, LEVELS):
        for node in tree.frontier(level, width):
            grow(node)
    draft = tree.draft()
    return draft.tokens, draft.parents


def drafted(head, *batch):
    head.observe(batch)
    drafts = head.collect([p.sequence_id for p in batch], 0.0).split()
    return [(drafts[p.sequence_id].tokens, drafts[p.sequence_id].parents) for p in batch]


@pytest.mark.parametrize("depth", [1, 2, 5, 31])
@pytest.mark.parametrize(
    "length", [2, 12, 17, 30, 33]
)  # branches within a block, across a boundary, and at the start of a block
def test_the_tree_is_the_reference_tree(length, depth):
    p = progress(IDS, depth, end=length)
    assert drafted(proposer(), p) == [reference(p)]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4},
        {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 5},
        {"temperature": 1.0, "seed": 6, "rule": "rejection"},
    ],
)
def test_sampled_trees(options):
    p = progress(IDS, 12, end=20, **options)
    tree = drafted(proposer(), p)
    assert tree == [reference(p)]
    assert max(depths(tree[0][1])) > 1


def test_max_levels_bounds_each_tree():
    head = proposer()
    batch = [
        replace(progress(IDS, 12, end=20, sequence_id=i), max_levels=levels) for i, levels in enumerate((1, 2, None))
    ]
    trees = drafted(head, *batch)
    assert trees == [reference(p) for p in batch]
    assert [max(depths(parents)) for _, parents in trees[:2]] == [1, 2]


def draft_prefill(head, p):
    head.observe([p])
    return head.collect([p.sequence_id], 0.0).cost.prefill


def test_the_batch_reports_its_draft_prefill():
    head = proposer()
    assert draft_prefill(head, progress(IDS, 4, end=30)).tokens == 29
    assert draft_prefill(head, progress(IDS, 4, start=29, end=33)) == DraftPrefill()  # tokens of one round
    assert draft_prefill(head, progress(IDS, 4, end=33, sequence_id=1)).tokens >= 16  # found in its cache


def test_tokens_that_the_target_found_in_its_cache_count_as_draft_prefill():
    assert draft_prefill(proposer(), progress(IDS, 4, start=20, end=40)).tokens == 39


def test_several_rounds_and_sequences():
    head = proposer()
    head.observe([progress(IDS, 0, end=9)])
    for end, start in ((10, 8), (13, 9), (14, 12), (18, 13), (35, 17)):
        p = progress(IDS, 9, start=start, end=end)
        other = progress(IDS[::-1], 4, end=end, sequence_id=end)
        assert drafted(head, p, other) == [reference(p), reference(other)]


def test_states_of_an_inflated_target_may_be_wider_than_those_of_other_passes():
    """A batch in which one sequence comes from a captured step, which keeps the head's columns, and one from a prompt."""
    narrow, wide = progress(IDS, 4, end=9), progress(IDS[::-1], 4, end=12, sequence_id=1)
    columns = {layer: torch.cat([rows, torch.ones(len(rows), 8)], 1) for layer, rows in wide.hidden.by_layer.items()}
    inflated = replace(wide, hidden=HiddenRows(wide.hidden.start, columns, None))
    assert drafted(proposer(), narrow, inflated) == [reference(narrow), reference(wide)]


def test_depth_0_computes_nothing_and_keeps_the_states():
    head = proposer()
    head._runner.forward = None
    for end, start in ((9, 0), (12, 8), (20, 11)):
        head.observe([progress(IDS, 0, start=start, end=end)])
        assert not len(head.collect([0], 0.0).tokens)
    del head._runner.forward
    p = progress(IDS, 7, start=19, end=24)
    assert drafted(head, p) == [reference(p)]
    assert head._cache.pending.num_rows == 0


def test_tokens_without_states_are_not_attended_to():
    head = proposer()
    p = progress(IDS, 6, start=16, end=30)  # the target had the first block cached
    assert drafted(head, p) == [reference(p, slots=range(16, 29))]
    p = progress(IDS, 6, start=36, end=40)  # speculation was off for a while
    assert drafted(head, p) == [reference(p, slots=[*range(16, 29), *range(36, 39)])]


def test_a_sequence_without_most_of_its_states_has_a_class_of_its_own():
    head = proposer()
    refine = head.traits.traffic_class
    assert refine(CHAT, 0) == CHAT
    drafted(head, progress(IDS, 6, start=16, end=30))
    assert refine(CHAT, 0) == CHAT._replace(is_partial=True)
    drafted(head, progress(IDS, 6, start=29, end=34))
    assert refine(CHAT, 0) == CHAT  # 17 of 33 slots
    assert refine(CHAT, 7) == CHAT


def test_no_draft_without_the_newest_state():
    head = proposer()
    head.observe([progress(IDS, 5, end=20)])
    head.observe([progress(IDS, 5, end=22, hidden=False)])
    assert not len(head.collect([0], 0.0).tokens)


def test_a_long_prompt_is_computed_over_several_rounds():
    head = proposer(max_rows=16)
    head.observe([progress(IDS, 6, end=40)])
    assert not len(head.collect([0], 0.0).tokens)
    assert not len(head.collect([0], 0.0).tokens)
    p = progress(IDS, 6, end=40)
    assert head.collect([0], 0.0).split()[0].tokens == reference(p)[0]


def test_prefix_keys_are_shifted_by_one():
    """Slot 15 depends on token 16: a text that differs there shares no block, a text that differs later does."""
    head = proposer()
    drafted(head, progress(IDS, 2, end=40))
    used = head.num_free_blocks
    later = [*IDS[:34], *IDS[:6]]
    p = progress(later, 6, start=32, sequence_id=1)
    assert drafted(head, p) == [reference(p)]  # slots 0 to 31 came from the cache
    assert head.num_free_blocks == used - 1
    other = [*IDS[:16], (IDS[16] + 1) % 40, *IDS[17:24]]
    p = progress(other, 6, start=16, sequence_id=2)
    assert drafted(head, p) == [reference(p, slots=range(16, 23))]
    salted = progress(later, 6, start=32, sequence_id=3, salt="other tenant")
    assert drafted(head, salted) == [reference(salted, slots=range(32, 39))]
    first = progress([(IDS[0] + 1) % 40, *IDS[1:40]], 6, start=32, sequence_id=4)
    assert drafted(head, first) == [reference(first, slots=range(32, 39))]


def test_blocks_after_a_gap_are_not_shared():
    head = proposer()
    drafted(head, progress(IDS, 2, start=16, end=40))
    p = progress(IDS, 6, start=32, end=40, sequence_id=1)
    assert drafted(head, p) == [reference(p, slots=range(32, 39))]


def test_few_lanes_make_narrow_trees():
    head = proposer(lanes=2)
    p, other = progress(IDS, 9, end=20), progress(IDS, 9, end=25, sequence_id=1)
    assert drafted(head, p, other) == [reference(p, width=1), reference(other, width=1)]
    third = progress(IDS, 9, end=30, sequence_id=2)
    assert len(drafted(proposer(lanes=2), p)) == 1
    head.observe([progress(IDS, 9, end=21, start=19), progress(IDS, 9, end=26, start=24, sequence_id=1), third])
    assert len(head.collect([0, 1, 2], 0.0).sequence_ids) == 2


def test_close_frees_everything():
    head = proposer(num_blocks=8)
    head.observe([progress(IDS, 3, end=40)])
    head.collect([0], 0.0)
    assert head.num_free_blocks < 8
    head.close([0])
    head.close([0])
    assert head.num_free_blocks == 8
    assert not len(head.collect([0], 0.0).tokens)


def test_a_full_cache_gives_no_draft():
    head = proposer(num_blocks=2)
    assert head.collect([0], 0.0).sequence_ids == ()
    head.observe([progress(IDS, 3, end=40)])
    assert head.collect([0], 0.0).sequence_ids == ()
    p = progress(IDS, 3, end=20, sequence_id=1)
    assert drafted(head, p) == [reference(p)]


def test_trees_are_accepted_in_the_engine():
    head = eagle(TARGET)
    engine = tiny_engine(TARGET, head, MixedDepth(31), max_num_seqs=3, kv_tokens=4096)
    result = run(engine, mixed_requests(6, TINY.vocab_size, seed=5))
    assert result.accepted > 5
    assert head.num_free_blocks == 64
    assert head._cache.pending.num_rows == 0


def test_a_sequence_continues_after_graph_steps():
    """The graph executor may have cached more slots; it returns the states after them."""
    head = proposer()
    head.observe([progress(IDS, 6, end=20)])
    starts, prefill = head.begin_graph([0, 7])
    start = starts[0]
    assert prefill.tokens == 19
    assert start.num_cached == 18
    assert start.state.start == 18
    assert head.blocks(0, 40) is not None
    assert head.blocks(0, 65 * 16) is None
    p = progress(IDS, 6, start=18, end=23)
    head.observe([progress(IDS, 6, end=23, hidden=False)])
    head.end_graph(0, start.num_cached, p.hidden)
    drafts = head.collect([0], 0.0).split()[0]
    assert (drafts.tokens, drafts.parents) == reference(p)
    head.close([0])
    assert head.num_free_blocks == 64


def test_graph_steps_start_after_as_many_calls_as_the_prompts_need():
    head = proposer(max_rows=16)
    head.observe([progress(IDS, 6, end=40)])
    starts, prefill = head.begin_graph([0])
    assert starts[0].num_cached == 38
    assert prefill.tokens == 32  # the last 7 are as many as a round commits


def test_no_graph_steps_without_the_newest_state():
    head = proposer()
    head.observe([progress(IDS, 6, end=9)])
    head.observe([progress(IDS, 6, end=10, hidden=False)])
    assert head.begin_graph([0]) == ({}, DraftPrefill())
    head.end_graph(5, 3, progress(IDS, 6, end=9).hidden)  # a closed sequence
