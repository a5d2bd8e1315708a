from paceline.cluster.pairing.pairing import DraftView, Pairing, RoundTrip


def view(name, cost, usable=True, queue=0.0):
    return DraftView(name, cost, queue, usable)


def test_the_one_that_answers_soonest():
    views = [view("a", 0.004), view("b", 0.001), view("c", 0.0005, queue=0.1)]
    assert Pairing().choose(views, 0.0) == "b"


def test_nobody_usable():
    pairing = Pairing()
    assert pairing.choose([], 0.0) is None
    assert pairing.choose([view("a", 0.001, usable=False)], 0.0) is None
    assert pairing.choose([view("a", 0.001)], 0.0) == "a"


def test_it_sticks_while_the_other_is_only_a_little_better():
    pairing = Pairing(margin=0.25, min_gain=0.0005, hold=2.0)
    pairing.choose([view("a", 0.004), view("b", 0.005)], 0.0)
    for now in range(100):
        assert pairing.choose([view("a", 0.004), view("b", 0.0035)], float(now)) == "a"


def test_microseconds_are_not_worth_a_prefill():
    pairing = Pairing(margin=0.25, min_gain=0.0005, hold=2.0)
    pairing.choose([view("a", 0.0002), view("b", 0.01)], 0.0)
    for now in range(100):
        assert pairing.choose([view("a", 0.0002), view("b", 0.0001)], float(now)) == "a"


def test_it_moves_when_the_other_stays_much_better():
    pairing = Pairing(hold=2.0)
    far = [view("a", 0.010), view("b", 0.001)]
    pairing.choose([view("a", 0.001), view("b", 0.002)], 0.0)
    assert pairing.choose(far, 1.0) == "a"
    assert pairing.choose(far, 2.9) == "a"
    assert pairing.choose(far, 3.0) == "b"


def test_a_passing_advantage_moves_nothing():
    pairing = Pairing(hold=2.0)
    near, far = [view("a", 0.001), view("b", 0.002)], [view("a", 0.010), view("b", 0.001)]
    chosen = [pairing.choose(far if int(now) % 2 else near, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    assert set(chosen) == {"a"}


def test_a_lost_worker_is_left_at_once_and_found_again():
    pairing = Pairing(hold=2.0)
    pairing.choose([view("a", 0.001), view("b", 0.005)], 0.0)
    assert pairing.choose([view("a", 0.001, usable=False), view("b", 0.005)], 0.1) == "b"
    back = [view("a", 0.001), view("b", 0.005)]
    assert pairing.choose(back, 0.2) == "b"
    assert pairing.choose(back, 2.2) == "a"


def test_round_trips_that_nobody_watched_count_only_when_there_is_nothing_else():
    trip = RoundTrip()
    assert trip.seconds is None
    trip.observe(0.020, was_waiting=False)
    assert trip.seconds == 0.020
    trip.observe(0.004, was_waiting=True)
    trip.observe(0.001, was_waiting=False)
    assert trip.seconds == 0.004


def test_an_old_round_trip_is_forgotten():
    trip = RoundTrip()
    trip.observe(0.001, was_waiting=True)
    for _ in range(16):
        trip.observe(0.008, was_waiting=True)
    assert trip.seconds == 0.008


def test_what_nobody_watched_is_a_bound_and_no_measurement():
    trip = RoundTrip()
    trip.observe(0.6, was_waiting=False)
    assert (trip.seconds, trip.usual, trip.measured) == (0.6, 0.6, None)
    for seconds in (0.002, 0.0004, 0.003):
        trip.observe(seconds, was_waiting=True)
    assert (trip.seconds, trip.usual, trip.measured) == (0.0004, 0.002, 0.0004)
