"""What a pass of a draft has to earn."""

from paceline.policy.pairing.ahead import RATE_MIN_ROUNDS as MIN_ROUNDS
from paceline.policy.pairing.ahead import RATE_WINDOW as WINDOW
from paceline.policy.pairing.ahead import TargetTokenRate


def learned(tokens: float, seconds: float, rounds: int = 20) -> TargetTokenRate:
    rate = TargetTokenRate()
    for i in range(rounds + 1):
        rate.observe(tokens, i * seconds)
    return rate


def test_a_token_is_worth_the_time_in_which_others_are_made() -> None:
    rate = learned(tokens=4.0, seconds=0.02)  # 0.2 tokens a millisecond
    assert rate.is_worth_waiting(0.21, 0.001)
    assert not rate.is_worth_waiting(0.19, 0.001)
    assert not rate.is_worth_waiting(0.21, 0.002)


def test_every_token_is_worth_it_before_the_rate_is_known() -> None:
    assert TargetTokenRate().is_worth_waiting(0.0, 1.0)
    assert learned(4.0, 0.02, rounds=int(MIN_ROUNDS) - 1).is_worth_waiting(0.0, 1.0)


def test_a_round_that_committed_nothing_is_none() -> None:
    """The first request of a sequence."""
    assert learned(0.0, 0.02).is_worth_waiting(0.0, 1.0)


def test_a_faster_target_is_soon_noticed() -> None:
    rate = learned(4.0, 0.02)
    for i in range(int(3 * WINDOW)):
        rate.observe(4.0, 0.4 + i * 0.002)
    assert not rate.is_worth_waiting(0.5, 0.001)
