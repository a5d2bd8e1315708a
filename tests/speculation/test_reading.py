from paceline.speculation.proposers.ngram import NgramProposer
from paceline.speculation.reading import NO_READING, Reading, take_reading
from tests.fakes import tiny_model
from tests.heads import distilled


def test_it_is_taken_once() -> None:
    proposer = distilled(tiny_model())
    proposer.reading += Reading(3, 0.5)
    proposer.reading += Reading(4, 0.25)
    assert take_reading(proposer) == Reading(7, 0.75)
    assert take_reading(proposer) == NO_READING


def test_most_have_none() -> None:
    assert take_reading(NgramProposer()) == NO_READING
