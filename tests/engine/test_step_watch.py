from paceline.engine.failures import FACTOR, NUM_FIRST, StepTimePrediction


def test_a_size_is_measured_after_its_first_steps() -> None:
    watch = StepTimePrediction()
    for i in range(NUM_FIRST):
        watch.begin(5, float(i))
        assert watch.step_seconds is None
        watch.end(i + 0.9)  # compiles
    for _ in range(2):
        watch.begin(5, 10.0)
        watch.end(10.1)
    watch.begin(6, 20.0)
    assert watch.step_seconds == FACTOR * (10.1 - 10.0)
    watch.end(20.0)
    watch.begin(4096, 20.0)  # a long prompt is another size
    assert watch.step_seconds is None


def test_the_slowest_recent_step_counts() -> None:
    watch = StepTimePrediction()
    for seconds in (0.0, 0.0, 1.0, 3.0, 2.0):
        watch.begin(1, 0.0)
        watch.end(seconds)
    watch.begin(1, 0.0)
    assert watch.step_seconds == FACTOR * 3.0
