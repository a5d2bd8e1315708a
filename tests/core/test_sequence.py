from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import Sequence, SpeculationCounts, Status


def sequence(num_prompt: int, num_output: int = 0) -> Sequence:
    ids = list(range(num_prompt + num_output))
    return Sequence(0, "r", ids, num_prompt, SamplingParams(), SpeculationParams(), seed=1)


def test_decoding_is_a_difference_of_one() -> None:
    example = sequence(num_prompt=5)
    assert example.num_uncomputed == 5
    assert example.is_prefilling
    example.num_computed = 4
    assert example.num_uncomputed == 1
    assert not example.is_prefilling


def test_output_ids_follow_the_prompt() -> None:
    example = sequence(num_prompt=3, num_output=2)
    assert example.num_output == 2
    assert list(example.output_ids) == [3, 4]


def test_sequences_are_compared_by_identity() -> None:
    first, second = sequence(3), sequence(3)
    assert first != second
    assert len({first, second}) == 2


def test_status_decides_is_finished() -> None:
    example = sequence(3)
    assert not example.is_finished
    example.status = Status.FINISHED
    assert example.is_finished


def test_speculation_counts_build_a_histogram() -> None:
    counts = SpeculationCounts()
    for drafted, accepted in ((4, 4), (4, 0), (2, 1), (3, 0)):
        counts.add(drafted, accepted)
    assert (counts.rounds, counts.drafted, counts.accepted) == (4, 13, 5)
    assert counts.histogram == [2, 1, 0, 0, 1]
    assert sum(counts.histogram) == counts.rounds
    assert sum(k * rounds for k, rounds in enumerate(counts.histogram)) == counts.accepted
