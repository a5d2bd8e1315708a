"""Sequences in the cache of a draft model."""

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.models.runner.runner import ModelRunner
from paceline.speculation.proposers.model.model_drafter import Chunk, DraftSequence, ModelDrafter, SequenceParams
from tests.fakes import TINY, tiny_model

BLOCKS = 8
PROMPT = [i * 7 % 40 for i in range(20)]


def sequence(sequence_id: int = 0, ids: list[int] = PROMPT) -> DraftSequence:
    params = SequenceParams(SamplingParams(temperature=0.0), 1, 0, 1, "coupled", "")
    return DraftSequence(sequence_id, params, list(ids), len(ids))


def drafter(num_proposable: int = TINY.vocab_size, num_blocks: int = BLOCKS) -> "ModelDrafter[None]":
    runner = ModelRunner(tiny_model(), num_blocks)
    return ModelDrafter(runner, 64, num_proposable, TINY.vocab_size, lambda logits, rows: [])


def draft(part: "ModelDrafter[None]", one: DraftSequence, count: int) -> list[int]:
    for _ in range(count):
        assert part.reserve(one, len(one.ids))
        logits = part.forward([Chunk(one, one.num_missing)])
        assert logits is not None
        ((token, _),) = part.choose(logits, [one], [one.row()])
        one.ids.append(token)
    return one.ids[one.num_committed :]


@pytest.mark.parametrize(
    ("drafted", "num_cached", "committed", "expected"),
    [
        ([5, 6, 7], 22, [5, 6, 7, 8], 22),  # full acceptance: the last draft and the bonus are missing
        ([5, 6, 7], 22, [5, 9], 21),  # the second draft was rejected
        ([5, 6, 7], 22, [], 19),  # never verified: the last token is computed again
        ([], 20, [1, 2, 3], 20),  # plain decoding
    ],
)
def test_commit_keeps_the_cache_of_equal_tokens(
    drafted: list[int], num_cached: int, committed: list[int], expected: int
) -> None:
    one = sequence()
    one.ids += drafted
    one.num_cached = num_cached
    one.commit([*PROMPT, *committed])
    assert one.ids == [*PROMPT, *committed]
    assert one.num_committed == len(one.ids)
    assert one.num_cached == expected


def test_draft_after_a_commit_equals_the_draft_of_a_new_sequence() -> None:
    part, one = drafter(), sequence()
    tokens = draft(part, one, 4)
    one.commit([*PROMPT, tokens[0], 39])
    part.release_unused(one)
    assert draft(part, one, 4) == draft(drafter(), sequence(0, [*PROMPT, tokens[0], 39]), 4)


def test_prefill_computes_all_but_two_tokens_within_the_budget() -> None:
    part, one, other = drafter(), sequence(), sequence(1, PROMPT[::-1])
    ready, cost = part.prefill([one, other], [2, 2], budget=24)
    assert ready == [one]
    assert (one.num_missing, other.num_missing) == (1, 15)
    assert cost.prefill.tokens == 24
    assert cost.behind == {1}
    ready, _ = part.prefill([one, other], [2, 2], budget=24)
    assert ready == [one, other]


def test_logits_outside_the_vocabulary_of_the_draft_are_minus_infinity() -> None:
    part, one = drafter(num_proposable=30), sequence(0, [35, 3, 39])
    assert part.reserve(one, 3)
    logits = part.forward([Chunk(one, 3)])
    assert logits is not None
    assert logits.shape == (1, TINY.vocab_size)
    assert torch.isinf(logits[:, 30:]).all()
    assert torch.isfinite(logits[:, :30]).all()


def test_blocks_are_reserved_and_freed() -> None:
    part, one = drafter(num_blocks=3), sequence()
    assert part.has_room(None, 48)
    assert not part.has_room(None, 49)
    assert part.reserve(one, 40)
    assert not part.reserve(one, 49)
    assert part.num_free_blocks == 0
    part.forward([Chunk(one, 20)])
    part.release_unused(one)
    assert part.num_free_blocks == 1
    part.close([one])
    assert (part.num_free_blocks, one.num_cached) == (3, 0)


def test_tokens_computed_by_the_graph_executor_are_published() -> None:
    part, one = drafter(), sequence()
    assert part.reserve(one, 40)
    one.commit([*PROMPT, *range(15)])
    part.mark_computed(one, 33)
    assert one.num_missing == 2
    assert part.tables.pool.num_cached == 2
