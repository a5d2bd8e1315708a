"""The Retry-After header follows the rate of finished choices."""

from paceline.gateway.sessions.admission import MAX_RETRY_AFTER, NUM_FINISH_TIMES, RetryAfter


def after(*times: float) -> RetryAfter:
    retry_after = RetryAfter()
    for time in times:
        retry_after.add_finish(time)
    return retry_after


def test_without_a_rate_the_client_retries_soon() -> None:
    assert after().seconds(100) == 1
    assert after(5.0).seconds(100) == 1


def test_the_queue_empties_at_the_recent_rate() -> None:
    retry_after = after(10.0, 10.5, 11.0)
    assert [retry_after.seconds(waiting) for waiting in (0, 1, 3, 20)] == [1, 1, 2, 10]
    assert retry_after.seconds(10**6) == MAX_RETRY_AFTER


def test_old_finish_times_do_not_count() -> None:
    retry_after = after(0.0, *(1000.0 + i for i in range(NUM_FINISH_TIMES)))
    assert retry_after.seconds(10) == 10


def test_an_idle_period_is_no_rate() -> None:
    retry_after = after(10.0, 20.0)
    retry_after.clear()
    retry_after.add_finish(1000.0)
    assert retry_after.seconds(10) == 1
