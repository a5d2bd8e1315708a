from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import Placement, PoolConfig
from paceline.policy.pairing.pairing import DraftView, Pairing, RoundTrip, colocated_pools, is_worth_waiting

TARGET = PoolConfig("target", "target", "m", replicas=2)
DRAFT = PoolConfig("draft", "draft", "m", replicas=3, placement=Placement("target"))
ALONE = PoolConfig("far", "draft", "m")
CONFIG = ClusterConfig((DRAFT, TARGET, ALONE))


def view(name, cost, usable=True, queue=0.0):
    return DraftView(name, cost, queue, usable)


def test_worker_with_least_cost_is_chosen():
    views = [view("a", 0.004), view("b", 0.001), view("c", 0.0005, queue=0.1)]
    assert Pairing().choose(views, 0.0) == "b"


def test_no_usable_worker():
    pairing = Pairing()
    assert pairing.choose([], 0.0) is None
    assert pairing.choose([view("a", 0.001, usable=False)], 0.0) is None
    assert pairing.choose([view("a", 0.001)], 0.0) == "a"


def test_small_advantage_does_not_change_the_worker():
    pairing = Pairing(margin=0.25, min_gain=0.0005, hold=2.0)
    pairing.choose([view("a", 0.004), view("b", 0.005)], 0.0)
    for now in range(100):
        assert pairing.choose([view("a", 0.004), view("b", 0.0035)], float(now)) == "a"


def test_gain_below_the_minimum_does_not_change_the_worker():
    pairing = Pairing(margin=0.25, min_gain=0.0005, hold=2.0)
    pairing.choose([view("a", 0.0002), view("b", 0.01)], 0.0)
    for now in range(100):
        assert pairing.choose([view("a", 0.0002), view("b", 0.0001)], float(now)) == "a"


def test_lasting_advantage_changes_the_worker():
    pairing = Pairing(hold=2.0)
    far = [view("a", 0.010), view("b", 0.001)]
    pairing.choose([view("a", 0.001), view("b", 0.002)], 0.0)
    assert pairing.choose(far, 1.0) == "a"
    assert pairing.choose(far, 2.9) == "a"
    assert pairing.choose(far, 3.0) == "b"


def test_short_advantage_does_not_change_the_worker():
    pairing = Pairing(hold=2.0)
    near, far = [view("a", 0.001), view("b", 0.002)], [view("a", 0.010), view("b", 0.001)]
    chosen = [pairing.choose(far if int(now) % 2 else near, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    assert set(chosen) == {"a"}


def test_unusable_worker_is_replaced_at_once():
    pairing = Pairing(hold=2.0)
    pairing.choose([view("a", 0.001), view("b", 0.005)], 0.0)
    assert pairing.choose([view("a", 0.001, usable=False), view("b", 0.005)], 0.1) == "b"
    back = [view("a", 0.001), view("b", 0.005)]
    assert pairing.choose(back, 0.2) == "b"
    assert pairing.choose(back, 2.2) == "a"


def test_samples_without_waiting_count_only_without_others():
    trip = RoundTrip()
    assert trip.seconds is None
    trip.observe(0.020, was_waiting=False)
    assert trip.seconds == 0.020
    trip.observe(0.004, was_waiting=True)
    trip.observe(0.001, was_waiting=False)
    assert trip.seconds == 0.004


def test_old_samples_are_dropped():
    trip = RoundTrip()
    trip.observe(0.001, was_waiting=True)
    for _ in range(16):
        trip.observe(0.008, was_waiting=True)
    assert trip.seconds == 0.008


def test_samples_without_waiting_are_not_measurements():
    trip = RoundTrip()
    trip.observe(0.6, was_waiting=False)
    assert (trip.seconds, trip.usual, trip.measured) == (0.6, 0.6, None)
    for seconds in (0.002, 0.0004, 0.003):
        trip.observe(seconds, was_waiting=True)
    assert (trip.seconds, trip.usual, trip.measured) == (0.0004, 0.002, 0.0004)


def test_single_sequence_waits_for_a_good_draft():
    # 3.7 tokens in 25 ms beat 1 in 15
    assert is_worth_waiting(ready=0, missing=1, gain=2.7, wait=0.010, step=0.015)
    assert not is_worth_waiting(ready=0, missing=1, gain=0.5, wait=0.010, step=0.015)


def test_one_missing_draft_does_not_delay_a_batch():
    assert not is_worth_waiting(ready=15, missing=1, gain=2.7, wait=0.010, step=0.015)
    assert is_worth_waiting(ready=1, missing=15, gain=2.7, wait=0.010, step=0.015)


def test_a_short_wait_is_worth_it():
    assert is_worth_waiting(ready=15, missing=1, gain=2.7, wait=0.0001, step=0.015)


def test_colocated_pools_start_with_the_host() -> None:
    assert colocated_pools(CONFIG, TARGET, 1) == [TARGET, DRAFT]
    assert colocated_pools(CONFIG, DRAFT, 1) == [TARGET, DRAFT]


def test_pool_without_partner_is_alone() -> None:
    assert colocated_pools(CONFIG, ALONE, 0) == [ALONE]
    assert colocated_pools(CONFIG, DRAFT, 2) == [DRAFT]
