"""Trees of a draft model: the same as from whole passes, with the cache of whichever path is accepted."""

import random

import pytest

from paceline.core.request import SamplingParams, Verification
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.proposers.model.model_trees import LEVELS, WIDTH
from paceline.speculation.trees.growth import Growth, draft_row, rank
from tests.exactness.suite import next_logits
from tests.fakes import TINY, draft_model, tiny_model

MODEL = tiny_model()
VOCAB = TINY.vocab_size
LONG = [i * 7 % VOCAB for i in range(50)]
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=5, repetition_penalty=1.3),
)
BRANCHES = 4


def progress(
    ids: list[int],
    nodes: int,
    sequence_id: int = 0,
    sampling: SamplingParams = SAMPLINGS[1],
    verification: Verification = "coupled",
    max_levels: int | None = None,
) -> SequenceProgress:
    return SequenceProgress(sequence_id, ids, nodes, sampling, 5, 0, 1, verification, max_levels=max_levels)


def drafts(proposer: DraftModelProposer, *batch: SequenceProgress) -> dict[int, Draft]:
    proposer.observe(batch)
    return proposer.collect([one.sequence_id for one in batch], 0.0).split()


def expected(one: SequenceProgress) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tree from a pass over the whole text for each node."""
    tree = Growth(one.depth, one.max_levels)
    level, nodes = 0, [-1]
    while nodes and level < LEVELS:
        for node in nodes:
            path = tree.path(node)
            row = draft_row(one, path)
            logits = next_logits(MODEL, [*one.ids, *path]).unsqueeze(0)
            tree.add(node, rank(logits, [row], [one.verification == "coupled"], None, min(BRANCHES, one.depth))[0])
        level += 1
        nodes = tree.frontier(level, WIDTH)
    drawn = tree.draft()
    return drawn.tokens, drawn.parents


def shape(draft: Draft) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return draft.tokens, draft.parents


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("nodes", [1, 2, 7, 20])
def test_tree_is_that_of_whole_passes(sampling: SamplingParams, nodes: int) -> None:
    one = progress(LONG[:15], nodes, sampling=sampling)
    found = drafts(draft_model(MODEL, branches=BRANCHES), one)[0]
    assert shape(found) == expected(one)
    assert len(found) == nodes


def test_paths_have_at_most_max_levels() -> None:
    one = progress(LONG[:9], 12, max_levels=2)
    found = drafts(draft_model(MODEL, branches=BRANCHES), one)[0]
    assert shape(found) == expected(one)
    assert max(len(found.path(node)) for node in range(len(found))) == 2


def test_every_path_keeps_its_cache() -> None:
    """Whichever node is accepted, the next draft is right, and its first pass has the tokens after the computed nodes only."""
    first = drafts(draft_model(MODEL, branches=BRANCHES), progress(LONG[:15], 14))[0]
    parents, reused = set(first.parents), 0
    for node in range(len(first)):
        proposer, ids = draft_model(MODEL, branches=BRANCHES), LONG[:15]
        drafts(proposer, progress(ids, 14))
        path = [first.tokens[i] for i in first.path(node)]
        ids = [*ids, *path, 3]
        proposer.observe([progress(ids, 6)])
        sequence = proposer.sequence(0)
        assert sequence is not None
        if node in parents:
            assert sequence.num_missing == 1
            reused += 1
        assert sequence.num_missing <= 2
        assert shape(proposer.collect([0], 0.0).split()[0]) == expected(progress(ids, 6))
        proposer.close([0])
        assert proposer.num_free_blocks == 64
    assert reused > 3


def test_sampled_rejection_is_a_chain_with_distributions() -> None:
    batch = [progress(LONG[:9], 5, 0, verification="rejection", max_levels=3), progress(LONG[:7], 5, 1)]
    found = drafts(draft_model(MODEL, branches=BRANCHES), *batch)
    assert (len(found[0]), found[0].is_chain) == (3, True)
    assert shape(found[1]) == expected(batch[1])
    q = found[0].q(VOCAB)
    assert q is not None
    assert all(float(q[i, token]) > 0 for i, token in enumerate(found[0].tokens))


def test_lanes_of_sequences_that_pause_are_freed() -> None:
    proposer = draft_model(MODEL, branches=BRANCHES)
    drafts(proposer, progress(LONG[:15], 14, 0))
    held = 64 - proposer.num_free_blocks
    drafts(proposer, progress(LONG[:4], 1, 1))  # sequence 0 is not observed: it drafts nothing in this step
    assert 64 - proposer.num_free_blocks < held
    proposer.close([0, 1])
    assert proposer.num_free_blocks == 64


@pytest.mark.parametrize(("num_blocks", "max_rows"), [(64, 64), (64, 12), (9, 64), (7, 12)])
@pytest.mark.parametrize("seed", range(2))
def test_any_history(num_blocks: int, max_rows: int, seed: int) -> None:
    """Random paths are accepted; sequences come, pause and go. A small cache makes trees smaller, never wrong."""
    rng = random.Random(seed)
    proposer = draft_model(MODEL, num_blocks, max_rows, branches=BRANCHES)
    texts: dict[int, list[int]] = {}
    found: dict[int, Draft] = {}
    numbers, compared = iter(range(1000)), 0
    for _ in range(20):
        while len(texts) < 3:
            texts[next(numbers)] = [*rng.choice((LONG[:33], [])), *(rng.randrange(VOCAB) for _ in range(9))]
        for i, ids in texts.items():
            draft = found.get(i, Draft())
            path = draft.path(rng.randrange(-1, len(draft)))
            ids += [*(draft.tokens[node] for node in path), rng.randrange(VOCAB)]
        batch = [progress(ids, rng.choice((1, 5, 12)), i) for i, ids in texts.items() if rng.random() < 0.8]
        found = drafts(proposer, *batch)
        for one in batch:
            if one.sequence_id in found and num_blocks == max_rows == 64:
                assert shape(found[one.sequence_id]) == expected(one)
                compared += 1
        for i in [i for i in texts if rng.random() < 0.1 or len(texts[i]) > 90]:
            proposer.close([i])
            del texts[i]
        proposer.drafter.tables.pool.check()
    proposer.close(list(texts))
    assert proposer.num_free_blocks == num_blocks
    assert compared > 20 or num_blocks < 64 or max_rows < 64
