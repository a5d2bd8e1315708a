from paceline.runtime.weights.server import BUSY_SHARE, SendRate


def given(rate: SendRate, chunks: int, size: int, busy: bool = False, seconds: float = 0.0) -> float:
    """When the last of the chunks may go, each taking `seconds` to make ready."""
    now = 100.0
    for _ in range(chunks):
        now += rate.wait(now)
        began, now = now, now + seconds
        rate.add(size, began, now, busy)
    return now + rate.wait(now) - 100.0


def test_no_more_than_the_limit_goes_out() -> None:
    assert given(SendRate(1000.0), 10, 500) == 5.0
    assert abs(given(SendRate(1000.0), 10, 500, seconds=0.1) - 5.0) < 1e-9  # making them ready counts


def test_a_worker_that_serves_gives_a_share_of_it() -> None:
    assert given(SendRate(1000.0), 10, 500, busy=True) == 5.0 / BUSY_SHARE
    assert abs(given(SendRate(0.0), 10, 500, busy=True, seconds=0.1) - 1.0 / BUSY_SHARE) < 1e-9


def test_without_a_limit_nobody_waits() -> None:
    assert given(SendRate(0.0), 10, 500) == 0.0
    assert abs(given(SendRate(0.0), 10, 500, seconds=0.1) - 1.0) < 1e-9


def test_what_was_not_used_is_not_saved_up() -> None:
    rate = SendRate(1000.0)
    rate.add(500, 100.0, 100.0, False)
    rate.add(500, 200.0, 200.0, False)
    assert rate.wait(200.0) == 0.5
