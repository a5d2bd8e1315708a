import math

import pytest

from paceline.tools.bench.report import Alpha, Summary, alphas_by_position, percentile
from paceline.tools.prompts.prompts import AnswerTimes, Arrival


def test_alpha_ignores_positions_after_a_rejection() -> None:
    arrivals = [
        Arrival(0.0, 3, drafted=4, accepted=2),
        Arrival(0.0, 5, drafted=4, accepted=4),
        Arrival(0.0, 1, drafted=2),
        Arrival(0.0, 1),
    ]
    # position 1: three rounds, one rejected there; 2: two of two; 3: the first round's rejection; 4: the second round alone
    assert alphas_by_position(arrivals) == (Alpha(2, 3), Alpha(2, 2), Alpha(1, 2), Alpha(1, 1))
    assert alphas_by_position([Arrival(0.0, 1)]) == ()


def test_percentile_interpolates_and_of_nothing_is_none() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_tokens_of_one_arrival_share_the_time() -> None:
    trace = AnswerTimes("a", 10.0, (Arrival(10.5, 1), Arrival(10.8, 3, 2, 2), Arrival(10.9, 1)), "")
    assert trace.ttft == pytest.approx(0.5)
    assert trace.token_seconds == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert trace.seconds == pytest.approx(0.9)


def test_arrival_without_tokens_keeps_its_time() -> None:
    trace = AnswerTimes("a", 0.0, (Arrival(0.1, 1), Arrival(0.2, 0), Arrival(0.3, 2)), "")
    assert trace.token_seconds == pytest.approx([0.1, 0.1])
    assert math.isclose(sum(trace.token_seconds), 0.2)


def test_summary_of_two_requests() -> None:
    one = AnswerTimes("a", 0.0, (Arrival(1.0, 1), Arrival(2.0, 3, 4, 2), Arrival(3.0, 1, 2, 0)), "")
    two = AnswerTimes("a", 0.0, (Arrival(3.0, 1), Arrival(4.0, 1)), "")
    summary = Summary.of([one, two], seconds=5.0)
    assert (summary.requests, summary.tokens, summary.tokens_per_second) == (2, 7, 1.4)
    assert summary.tokens_per_round == pytest.approx(5 / 3)  # three passes after two prefills
    assert (summary.drafted, summary.accepted, summary.draft_acceptance_rate) == (6, 2, pytest.approx(1 / 3))
    assert summary.alpha == pytest.approx(2 / 4)  # rejected at 3 in one round and at 1 in the other
    assert summary.ttft_p50 == 2.0
    assert Summary.of([one, two]).seconds == 7.0  # summed


def test_summary_of_no_traces() -> None:
    summary = Summary.of([AnswerTimes("a", 0.0, (), "")])
    assert summary.tokens_per_second == 0.0
    assert summary.tokens_per_round is summary.alpha is summary.draft_acceptance_rate is summary.token_p99 is None
