import itertools
import math

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.speculation.proposer import HiddenRows, SequenceProgress
from paceline.speculation.verification.tree import MAX_NODES
from tests.exactness.suite import mixed_requests
from tests.fakes import TINY, MixedDepth, run, tiny_engine, tiny_model
from tests.heads import draft_config, draft_tensors, medusa
from tests.models.reference_heads import medusa_logits, target_states

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS = [7, 3, 22, 9, 14, 39, 0, 5, 5, 8, 31]
TARGET = tiny_model()
TENSORS = draft_tensors(draft_config(TARGET, "medusa"), reduced=24)


def progress(depth, end=11, hidden=True, sequence_id=0):
    _, last = target_states(TARGET, IDS[: end - 1], ())
    states = HiddenRows(end - 4, {}, last[end - 4 :]) if hidden else None
    return SequenceProgress(
        sequence_id, IDS[:end], depth, SamplingParams(temperature=0.0), 0, 0, 2, "coupled", hidden=states
    )


def paths(draft):
    return [tuple(draft.tokens[node] for node in draft.path(i)) for i in range(len(draft))]


@pytest.mark.parametrize("depth", [1, 4, 20])
def test_the_nodes_with_the_largest_products_are_drafted(depth):
    head = medusa(TARGET, reduced=24)
    p = progress(depth)
    head.observe([p])
    draft = head.collect([0], 0.0).split()[0]
    _, last = target_states(TARGET, IDS[:-1], ())
    ids = torch.arange(24) + TENSORS["d2t"]
    levels = []
    for k in (1, 2, 3):  # head k drafts token k after the newest
        best = medusa_logits(TENSORS, TARGET, last[-1], k).softmax(0).topk(24)
        levels.append(list(zip(ids[best.indices].tolist(), best.values.tolist(), strict=True)))
    products = {
        tuple(token for token, _ in path): math.prod(value for _, value in path)
        for length in (1, 2, 3)
        for path in itertools.product(*levels[:length])
    }
    expected = sorted(products, key=lambda path: -products[path])[:depth]
    assert paths(draft) == expected


def test_no_draft_without_the_state_before_the_newest_token():
    head = medusa(TARGET)
    head.observe([progress(4, end=8)])
    head.observe([progress(4, end=9, hidden=False)])
    assert head.collect([0], 0.0).sequence_ids == ()
    head.observe([progress(0)])
    assert head.collect([0], 0.0).sequence_ids == ()
    head.observe([progress(400)])
    assert head.collect([0, 1], 0.0).counts == (MAX_NODES,)
    head.close([0])
    head.close([0])
    assert head.collect([0], 0.0).sequence_ids == ()


def test_trees_are_accepted_in_the_engine():
    engine = tiny_engine(TARGET, medusa(TARGET), MixedDepth(31), max_num_seqs=3, kv_tokens=4096)
    assert run(engine, mixed_requests(6, TINY.vocab_size, seed=5)).accepted > 5
