from paceline.cluster.health.health import Backoff, BackoffRule


def test_the_wait_doubles_up_to_a_bound() -> None:
    backoff = Backoff(BackoffRule(first=1.0, most=5.0))
    assert [backoff.delay(0.1) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert backoff.deaths == 4


def test_a_long_life_is_forgiven_what_came_before() -> None:
    backoff = Backoff(BackoffRule(first=1.0, forgiven=60.0))
    backoff.delay(1.0)
    backoff.delay(1.0)
    assert backoff.delay(60.0) == 1.0
    assert backoff.delay(1.0) == 2.0
