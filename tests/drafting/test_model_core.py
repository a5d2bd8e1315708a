"""A draft model with branches that fork, are truncated and share blocks: each must see its own text only."""

import pytest

from paceline.core.request import SamplingParams
from paceline.drafting.state import DraftBranch
from paceline.speculation.proposers.model.model_drafter import SequenceParams
from paceline.speculation.rows.noise import Purpose, gumbel
from tests.fakes import tiny_model
from tests.processes.pools import model_core

BLOCKS = 64


def branch(number, ids, committed=None, **sampling):
    params = SequenceParams(SamplingParams(**{"temperature": 1.0, **sampling}), 5, 0, 1, "coupled", "")
    return DraftBranch(number, params, list(ids), len(ids) if committed is None else committed)


def draft(core, *branches, count=4):
    for _ in range(count):
        for branch_, drafted in zip(branches, core.step(branches), strict=True):
            assert drafted is not None
            branch_.ids.append(drafted.token)
    return [one.ids[-count:] for one in branches]


def fresh(ids, count=4):
    return draft(model_core(tiny_model(), BLOCKS), branch(0, ids), count=count)[0]


@pytest.mark.parametrize("length", [3, 15, 16, 17, 30, 32, 33])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_forks_draft_like_separate_sequences(length, accepted):
    """Parent and children in one batch draft as each would alone, wherever the fork falls in a block."""
    core = model_core(tiny_model(), BLOCKS)
    prompt = [(7 * i) % 40 for i in range(length)]
    main = branch(0, prompt)
    draft(core, main)
    children = []
    for number, token in ((1, 39), (2, 38)):
        children.append(branch(number, [*prompt, *main.ids[length : length + accepted], token], length))
        core.fork(main, children[-1])
        assert children[-1].num_cached >= length, "the shared text is not computed again"
    before = [list(one.ids) for one in (main, *children)]
    assert draft(core, main, *children) == [fresh(ids) for ids in before]
    core.close([main, *children])
    core.drafter.tables.pool.check()
    assert core.num_free_blocks == BLOCKS


@pytest.mark.parametrize("length", [20, 21, 31, 32, 33])
def test_truncated_branch_drafts_like_a_new_one(length):
    core = model_core(tiny_model(), BLOCKS)
    main = branch(0, range(20))
    draft(core, main, count=20)
    core.truncate(main, length)
    main.ids.append(39)
    main.num_committed = len(main.ids)
    expected = fresh(list(main.ids))
    assert draft(core, main) == [expected]


def test_drafted_tokens_are_not_in_the_prefix_cache():
    """Only committed blocks are published: a sequence with the same salt finds those and no others."""
    core = model_core(tiny_model(), BLOCKS)
    main = branch(0, range(20))
    draft(core, main, count=20)
    other = branch(1, main.ids[:36])
    core.step([other])
    assert core.drafter.tables.pool.num_cached == 2, "one block of the first prompt, one more of the second"
    salted = DraftBranch(2, SequenceParams(SamplingParams(), 5, 0, 1, "coupled", "another tenant"), list(range(20)), 20)
    core.step([salted])
    assert core.drafter.tables.pool.num_cached == 3


def test_long_prompts_are_computed_in_chunks():
    core = model_core(tiny_model(), BLOCKS, max_rows=16)
    short, long = branch(0, [1, 2]), branch(1, [(3 * i) % 40 for i in range(50)])
    for _ in range(3):
        drafted = core.step([short, long])
        assert drafted[0] is not None
        assert drafted[1] is None
        short.ids.append(drafted[0].token)
    drafted = core.step([short, long])
    assert drafted[1] is not None
    assert drafted[1].token == fresh(list(long.ids), 1)[0]


def test_without_free_blocks_a_branch_gets_no_token():
    core = model_core(tiny_model(), num_blocks=2)
    big, small = branch(0, range(30)), branch(1, range(20))
    assert core.step([big])[0] is not None
    assert core.step([small]) == [None]
    core.close([big])
    assert core.step([small])[0] is not None
    assert core.step([branch(2, [1] * 600)]) == [None], "beyond the model's window"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_gap_is_the_distance_from_the_best_other_score(temperature):
    core = model_core(tiny_model(), BLOCKS)
    main = branch(0, [3, 1, 4], temperature=temperature)
    logits = []
    forward = core.drafter.forward
    core.drafter.forward = lambda chunks: logits.append(forward(chunks)) or logits[-1]
    [drafted] = core.step([main])
    scores = logits[0][0].clone()
    if temperature:
        scores += temperature * gumbel([main.row().key], Purpose.SHARED, len(scores), scores.device)[0]
    best = scores.topk(2)
    assert drafted.token == int(best.indices[0])
    assert drafted.gap == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)
    assert drafted.alternatives[0] == int(best.indices[1])


def test_no_gap_where_the_ranking_does_not_choose():
    """Under rejection the token is a sample of q; a bias that the ranking leaves out may choose another token."""
    core = model_core(tiny_model(), BLOCKS)
    params = SequenceParams(SamplingParams(temperature=1.0), 5, 0, 1, "rejection", "")
    sampled = DraftBranch(0, params, [1, 2], 2)
    biased = branch(1, [1, 2], temperature=0.0, logit_bias={7: 100.0})
    plain = branch(2, [1, 2], temperature=0.0)
    drafted = core.step([sampled, biased, plain])
    assert [one.gap is None for one in drafted] == [True, True, False]
    assert drafted[1].token == 7 != drafted[2].token


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"logit_bias": {7: 100.0}}]
)
def test_branches_without_ranking_draft_the_same_tokens(sampling):
    core, prompts = model_core(tiny_model(), BLOCKS), [[3, 1, 4], list(range(20))]
    ranked = [branch(i, prompt, **sampling) for i, prompt in enumerate(prompts)]
    expected = draft(core, *ranked)
    unranked = [branch(10 + i, prompt, **sampling) for i, prompt in enumerate(prompts)]
    for one in unranked:
        one.is_ranked = False
    assert draft(core, *unranked) == expected
    drafted = core.step(unranked)
    assert [(one.alternatives, one.gap) for one in drafted] == [((), None)] * 2


def test_no_logits_leave_a_pass_that_ranks_nothing():
    """The pass picks the tokens itself. A prompt that does not end in it gets no token."""
    core = model_core(tiny_model(), BLOCKS, max_rows=16)
    short, long = branch(0, [1, 2]), branch(1, [(3 * i) % 40 for i in range(20)])
    short.is_ranked = long.is_ranked = False
    passes = []
    forward = core.drafter.runner.forward
    core.drafter.runner.forward = lambda *args, **kwargs: passes.append(forward(*args, **kwargs)) or passes[-1]
    first, second = core.step([short, long])
    assert first is not None
    assert second is None
    if core.drafter.runner.can_pick:  # with native kernels
        assert [one.logits for one in passes] == [None]
