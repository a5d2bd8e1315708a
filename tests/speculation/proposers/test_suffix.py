from collections.abc import Sequence
from dataclasses import replace

from paceline.core.sampling import SamplingParams
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import Progress
from paceline.speculation.proposers.suffix import SuffixProposer
from tests.speculation.proposers.test_ngram import Untouchable

PASSAGE = list(range(10, 30))


def progress(ids: Sequence[int], depth: int, sequence_id: int = 0, salt: str = "", num_prompt: int = 1) -> Progress:
    return Progress(sequence_id, ids, depth, SamplingParams(), 0, 0, num_prompt, "coupled", salt)


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


def test_an_answer_drafts_for_the_next_request_of_the_same_salt_only() -> None:
    proposer = SuffixProposer()
    draft(proposer, [1, 2, 3, *PASSAGE], 4, sequence_id=1, salt="ours", num_prompt=3)
    proposer.close([1])
    requested = [7, 8, *PASSAGE[:8]]
    assert draft(proposer, requested, 4, sequence_id=2, salt="ours", num_prompt=2).tokens == tuple(PASSAGE[8:12])
    assert len(draft(proposer, requested, 4, sequence_id=3, salt="theirs", num_prompt=2)) == 0
    assert len(draft(proposer, requested, 4, sequence_id=4, num_prompt=2)) == 0


def test_rejection_sampling_draws_on_its_own_text_alone() -> None:
    """The same seed requested before would have met the same noise."""
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


def test_only_outputs_are_remembered() -> None:
    """And as much of the prompt before them as a lookup can use."""
    proposer = SuffixProposer()
    draft(proposer, [*PASSAGE, *PASSAGE[::-1]], 4, sequence_id=1, num_prompt=40)
    proposer.close([1])
    assert proposer.num_remembered == 0
    draft(proposer, [*PASSAGE, *PASSAGE[::-1], 5, 6], 4, sequence_id=2, num_prompt=40)
    proposer.close([2])
    assert proposer.num_remembered == 18


def test_memory_is_bounded() -> None:
    proposer = SuffixProposer(max_tokens=400)
    for i in range(60):
        draft(proposer, [i, *range(i, i + 50)], 4, sequence_id=i, salt=str(i % 7))
        proposer.close([i])
        assert proposer.num_remembered <= 400
    assert proposer.num_remembered > 200


def test_depth_zero_costs_nothing_and_is_not_remembered() -> None:
    proposer = SuffixProposer()
    assert len(draft(proposer, Untouchable([1, 2, 1, 2]), 0)) == 0
    proposer.close([0])
    assert proposer.num_remembered == 0


def test_close_may_come_at_any_time_and_twice() -> None:
    proposer = SuffixProposer()
    proposer.close([5])
    draft(proposer, [1, *PASSAGE], 2, sequence_id=5)
    proposer.close([5])
    remembered = proposer.num_remembered
    proposer.close([5])
    assert proposer.num_remembered == remembered == 21
    assert proposer.collect([5], 0.0).sequence_ids == ()
