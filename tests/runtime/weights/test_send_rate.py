from paceline.runtime.weights.server import BUSY_SHARE, SendRate


def total_seconds(rate: SendRate, chunks: int, size: int, busy: bool = False, seconds: float = 0.0) -> float:
    """Time of the last chunk, if preparing each takes `seconds`."""
    now = 100.0
    for _ in range(chunks):
        now += rate.wait(now)
        began, now = now, now + seconds
        rate.add(size, began, now, busy)
    return now + rate.wait(now) - 100.0


def test_rate_stays_below_the_limit() -> None:
    assert total_seconds(SendRate(1000.0), 10, 500) == 5.0
    assert abs(total_seconds(SendRate(1000.0), 10, 500, seconds=0.1) - 5.0) < 1e-9  # preparing them counts


def test_busy_worker_uses_a_share_of_the_rate() -> None:
    assert total_seconds(SendRate(1000.0), 10, 500, busy=True) == 5.0 / BUSY_SHARE
    assert abs(total_seconds(SendRate(0.0), 10, 500, busy=True, seconds=0.1) - 1.0 / BUSY_SHARE) < 1e-9


def test_no_wait_without_a_limit() -> None:
    assert total_seconds(SendRate(0.0), 10, 500) == 0.0
    assert abs(total_seconds(SendRate(0.0), 10, 500, seconds=0.1) - 1.0) < 1e-9


def test_unused_time_does_not_accumulate() -> None:
    rate = SendRate(1000.0)
    rate.add(500, 100.0, 100.0, False)
    rate.add(500, 200.0, 200.0, False)
    assert rate.wait(200.0) == 0.5
