import pytest

from paceline.tools.profile.measurement import Part, ProfilePassTimes, TimeEstimate, sequences

PARTS = [Part("contexts", 10.0), Part("1 sequence", 30.0), Part("8 sequences", 40.0), Part("prompts", 20.0)]


def test_passes_between_two_measured_ones() -> None:
    times = ProfilePassTimes(0.010, 0.080, 8)
    assert [times.at(rows) for rows in (1, 8, 15)] == pytest.approx([0.010, 0.080, 0.150])
    assert ProfilePassTimes(0.010, 0.010, 1).at(4) == 0.010
    assert ProfilePassTimes(0.010, 0.009, 8).at(64) == 0.010


def test_as_fast_as_expected() -> None:
    estimate = TimeEstimate(PARTS, 5.0)
    seen = [
        estimate.begin(name, now)
        for name, now in zip([part.name for part in PARTS], (5.0, 15.0, 45.0, 85.0), strict=True)
    ]
    assert [one.done for one in seen] == pytest.approx([0.0, 0.1, 0.4, 0.8])
    assert [one.seconds_left for one in seen] == pytest.approx([100.0, 90.0, 60.0, 20.0])


def test_a_slower_machine_corrects_the_estimate() -> None:
    estimate = TimeEstimate(PARTS, 0.0)
    estimate.begin("contexts", 0.0)
    assert estimate.begin("1 sequence", 20.0).seconds_left == pytest.approx(90.0 * 30.0 / 20.0)
    assert estimate.begin("8 sequences", 80.0).seconds_left == pytest.approx(60.0 * 90.0 / 50.0)


def test_parts_that_are_left_out_cost_no_time() -> None:
    estimate = TimeEstimate(PARTS, 0.0)
    estimate.begin("contexts", 0.0)
    estimate.begin("1 sequence", 10.0)
    assert estimate.leave_out("8 sequences", 40.0).part == "8 sequences: left out, the time is over"
    last = estimate.begin("prompts", 40.0)
    assert (last.part, last.seconds_left, last.done) == ("prompts", pytest.approx(20.0), pytest.approx(0.8))


def test_one_sequence_and_many() -> None:
    assert [sequences(count) for count in (1, 2)] == ["1 sequence", "2 sequences"]
