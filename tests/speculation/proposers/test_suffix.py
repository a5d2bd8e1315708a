"""Suffix lookup: the tree of continuations, recent outputs, and the proposer."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.request import SamplingParams
from paceline.speculation.drafts.drafts import Draft, depths
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.suffix import (
    ESCAPE,
    MAX_FOLLOWERS,
    MIN_PROBABILITY,
    RecentOutputs,
    SuffixAutomaton,
    SuffixProposer,
    grow,
)
from tests.speculation.proposers.test_ngram import Untouchable

PASSAGE = list(range(10, 30))

# --- the tree of continuations


def text(*tokens: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    return automaton


def test_a_long_match_is_followed_deeper_than_a_short_one() -> None:
    passage = list(range(10, 40))
    long = text(*passage, 99, *passage[:12])
    short = text(*passage, 99, passage[0])
    deep, shallow = (grow(index, index.end, 16) for index in (long, short))
    assert deep.tokens[:8] == tuple(passage[12:20])
    assert len(shallow) < len(deep)
    assert shallow.expected < deep.expected


def test_two_continuations_become_branches_the_more_frequent_first() -> None:
    index = text(1, 2, 3, 5, 1, 2, 4, 6, 8, 1, 2, 4, 7, 9, 1, 2)
    tree = grow(index, index.end, 8)
    roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert roots[:2] == [4, 3]
    assert tree.tokens[0] == 4
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_probabilities_follow_the_equation() -> None:
    index = text(1, 2, 3, 9, 1, 2)  # one match of two tokens, once followed by 3
    tree = grow(index, index.end, 1)
    assert tree.tokens == (3,)
    assert tree.expected == pytest.approx(1 / (1 + ESCAPE / 2))


def test_budget_and_minimal_probability_bound_the_tree() -> None:
    loop = text(*([5, 6, 7] * 20))
    for budget in (1, 3, 10):
        tree = grow(loop, loop.end, budget)
        assert len(tree) == budget
        assert max(depths(tree.parents)) == budget
    assert tree.tokens == (5, 6, 7, 5, 6, 7, 5, 6, 7, 5)
    rare = text(1, 2, 1, 3, 1, 4, 1, 5, 1)  # 1 is followed by each of four tokens once: 1 / (4 + 2) each, then less
    assert len(grow(rare, rare.end, 16)) <= 1 / MIN_PROBABILITY


def test_a_context_followed_by_anything_predicts_nothing() -> None:
    tokens = [t for other in range(2, MAX_FOLLOWERS + 4) for t in (1, other)]
    index = text(*tokens, 1)
    assert len(grow(index, index.end, 8)) == 0


def test_no_context_gives_no_tree() -> None:
    assert len(grow(SuffixAutomaton(), (0, 0), 8)) == 0


# --- recent outputs


def is_known(outputs: RecentOutputs, salt: str, text: list[int]) -> bool:
    return any(index.match(text)[1] == len(text) for index in outputs.indices(salt))


def test_salts_are_separate() -> None:
    outputs = RecentOutputs(100)
    outputs.add("a", [1, 2, 3])
    assert is_known(outputs, "a", [1, 2, 3])
    assert not is_known(outputs, "b", [1])
    assert outputs.indices("") == ()


def test_old_texts_are_forgotten() -> None:
    outputs = RecentOutputs(40)  # ten tokens per index, two indices per salt
    for i in range(6):
        outputs.add("a", [10 * i + k for k in range(6)])
    assert outputs.num_tokens <= 20
    assert is_known(outputs, "a", [50, 51, 52, 53, 54, 55])
    assert not is_known(outputs, "a", [0, 1])


def test_the_least_recently_used_salt_is_forgotten_first() -> None:
    outputs = RecentOutputs(40)
    for salt in ("a", "b", "c", "d"):
        outputs.add(salt, list(range(10)))
    outputs.indices("a")  # used again
    outputs.add("e", list(range(10)))
    assert is_known(outputs, "a", [1, 2])
    assert not is_known(outputs, "b", [1])
    assert is_known(outputs, "e", [1, 2])


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_always_holds(seed: int) -> None:
    rng = random.Random(seed)
    outputs = RecentOutputs(64)
    for _ in range(200):
        text = [rng.randrange(50) for _ in range(rng.randint(0, 90))]
        salt = str(rng.randrange(6))
        outputs.add(salt, text)
        held = sum(len(index) for s in map(str, range(6)) for index in outputs.indices(s))
        assert outputs.num_tokens == held <= 64
        assert not text or is_known(outputs, salt, text[-16:])


def test_too_small_a_bound_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_tokens >= 4"):
        RecentOutputs(3)


# --- the proposer


def progress(
    ids: Sequence[int], depth: int, sequence_id: int = 0, salt: str = "", num_prompt: int = 1
) -> SequenceProgress:
    return SequenceProgress(sequence_id, ids, depth, SamplingParams(), 0, 0, num_prompt, "coupled", salt)


def draft(proposer: SuffixProposer, *args: object, **options: object) -> Draft:
    requested = progress(*args, **options)  # type: ignore[arg-type]
    proposer.observe([requested])
    return proposer.collect([requested.sequence_id], 0.0).split().get(requested.sequence_id, Draft())


def test_copies_from_the_text_so_far() -> None:
    found = draft(SuffixProposer(), [*PASSAGE, 99, *PASSAGE[:8]], 6)
    assert found.tokens == tuple(PASSAGE[8:14])
    assert found.is_chain
    assert found.probs is None


def test_follows_the_text_as_it_grows() -> None:
    proposer, ids = SuffixProposer(), [*PASSAGE, 99, *PASSAGE[:8]]
    draft(proposer, ids, 4)
    ids += [*PASSAGE[8:12], 77, *PASSAGE[2:9]]
    assert draft(proposer, ids, 3).tokens == tuple(PASSAGE[9:12])


def test_an_output_drafts_for_later_requests_of_its_salt_only() -> None:
    proposer = SuffixProposer()
    draft(proposer, [1, 2, 3, *PASSAGE], 4, sequence_id=1, salt="ours", num_prompt=3)
    proposer.close([1])
    requested = [7, 8, *PASSAGE[:8]]
    assert draft(proposer, requested, 4, sequence_id=2, salt="ours", num_prompt=2).tokens == tuple(PASSAGE[8:12])
    assert len(draft(proposer, requested, 4, sequence_id=3, salt="theirs", num_prompt=2)) == 0
    assert len(draft(proposer, requested, 4, sequence_id=4, num_prompt=2)) == 0


def test_a_text_that_repeats_an_output_is_kept_but_not_indexed() -> None:
    proposer = SuffixProposer()
    first = SequenceProgress(1, [*PASSAGE, 7, 8], 4, SamplingParams(temperature=0.0), 0, 0, 4, "coupled")
    proposer.observe([first])
    proposer.collect([1], 0.0)
    proposer.close([1])
    kept = proposer.num_kept
    proposer.observe([replace(first, sequence_id=2, ids=PASSAGE[:-2])])
    draft = proposer.collect([2], 0.0).split()[2]
    assert draft.tokens[:4] == (*PASSAGE[-2:], 7, 8)
    assert not len(proposer._sequences[2].text)
    proposer.close([2])
    assert proposer.num_kept > kept


def test_rejection_sampling_drafts_from_its_own_text_only() -> None:
    """An earlier request with the same seed had the same noise."""
    proposer = SuffixProposer()
    draft(proposer, [1, 2, 3, *PASSAGE], 4, sequence_id=1)
    proposer.close([1])
    requested = progress([7, 8, *PASSAGE[:8]], 4, sequence_id=2)
    own = progress([*PASSAGE, 99, *PASSAGE[:8]], 4, sequence_id=3)
    for verification, temperature, others in (
        ("rejection", 1.0, False),
        ("rejection", 0.0, True),
        ("coupled", 1.0, True),
    ):
        sampling = SamplingParams(temperature=temperature)
        both = [replace(one, sampling=sampling, verification=verification) for one in (requested, own)]  # type: ignore[arg-type]
        proposer.observe(both)
        drafts = proposer.collect([2, 3], 0.0).split()
        assert (2 in drafts) == others
        assert drafts[3].tokens == tuple(PASSAGE[8:12])


def test_only_outputs_are_kept() -> None:
    """With as much of the prompt before them as a lookup can match."""
    proposer = SuffixProposer()
    draft(proposer, [*PASSAGE, *PASSAGE[::-1]], 4, sequence_id=1, num_prompt=40)
    proposer.close([1])
    assert proposer.num_kept == 0
    draft(proposer, [*PASSAGE, *PASSAGE[::-1], 5, 6], 4, sequence_id=2, num_prompt=40)
    proposer.close([2])
    assert proposer.num_kept == 18


def test_memory_is_bounded() -> None:
    proposer = SuffixProposer(max_tokens=400)
    for i in range(60):
        draft(proposer, [i, *range(i, i + 50)], 4, sequence_id=i, salt=str(i % 7))
        proposer.close([i])
        assert proposer.num_kept <= 400
    assert proposer.num_kept > 200


def test_a_sequence_without_drafts_is_not_kept() -> None:
    proposer = SuffixProposer()
    assert len(draft(proposer, Untouchable([1, 2, 1, 2]), 0)) == 0
    proposer.close([0])
    assert proposer.num_kept == 0


def test_close_is_idempotent() -> None:
    proposer = SuffixProposer()
    proposer.close([5])
    draft(proposer, [1, *PASSAGE], 2, sequence_id=5)
    proposer.close([5])
    kept = proposer.num_kept
    proposer.close([5])
    assert proposer.num_kept == kept == 21
    assert proposer.collect([5], 0.0).sequence_ids == ()
