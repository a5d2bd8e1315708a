"""Queue order, shares and refusals between keys; decisions only."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline.gateway.auth.api_keys import ApiKey, KeyShare
from paceline.gateway.sessions.admission import OUTPUT_COST, AdmissionEntry, AdmissionLimits, AdmissionQueue, kv_needed

CAPACITY = AdmissionLimits(max_running=4, ahead=0, kv_tokens=100_000, max_waiting=8, max_waiting_tokens=50_000)


def key(name: str, **share: float) -> ApiKey:
    return ApiKey(name, id=name, share=KeyShare(**share))


ANN, BEN = key("ann"), key("ben")


def entry(owner: ApiKey, tokens: int = 100, priority: int = 0, choices: int = 1, output: int = 100) -> AdmissionEntry:
    return AdmissionEntry("", owner, priority, choices, tokens, kv_needed(tokens, output, choices))


def serve(queue: AdmissionQueue, capacity: AdmissionLimits, steps: int, output: int = 100) -> Counter[str]:
    """Tokens served by key while `steps` entries run one after the other."""
    served: Counter[str] = Counter()
    running = [*queue._running, *queue.take(capacity)]
    for _ in range(steps):
        done = running.pop(0)
        queue.spend(done, OUTPUT_COST * output)
        served[done.key.id] += done.prompt_tokens + output
        queue.finish_choice(done)
        running += queue.take(capacity)
    return served


def test_entries_of_one_key_start_in_order() -> None:
    queue, entries = AdmissionQueue(), [entry(ANN) for _ in range(6)]
    for one in entries:
        queue.add(one)
    assert list(queue.take(CAPACITY)) == entries[:4]
    assert (queue.num_waiting, queue.num_admitted) == (2, 6)
    queue.remove(entries[1])
    assert list(queue.take(CAPACITY)) == [entries[4]]


def test_the_counts_are_plain_numbers_that_any_thread_may_read() -> None:
    queue, first, second = AdmissionQueue(), entry(ANN, tokens=30, choices=2), entry(BEN, tokens=5)
    queue.add(first)
    queue.add(second)
    assert (vars(queue)["num_waiting"], vars(queue)["waiting_tokens"]) == (3, 35)
    queue.remove(second)
    queue.remove(second)
    assert (queue.num_waiting, queue.waiting_tokens) == (2, 30)
    assert list(queue.take(CAPACITY)) == [first]
    assert (queue.num_waiting, queue.waiting_tokens, queue.num_admitted) == (0, 0, 2)


def test_a_flood_of_one_key_does_not_delay_another() -> None:
    queue = AdmissionQueue()
    flood = [entry(ANN) for _ in range(200)]
    for one in flood:
        queue.add(one)
    running = list(queue.take(CAPACITY))
    late = entry(BEN)
    queue.add(late)
    queue.finish_choice(running[0])
    assert list(queue.take(CAPACITY)) == [late]


def test_keys_share_tokens_and_not_requests() -> None:
    queue, one = AdmissionQueue(), replace(CAPACITY, max_running=1)
    for _ in range(300):
        queue.add(entry(ANN, tokens=4000))
        queue.add(entry(BEN, tokens=100))
    served = serve(queue, one, 200)
    cost = {"ann": 4100 + 100, "ben": 200 + 100}  # prompt and twice the output
    counts = {name: tokens / {"ann": 4100, "ben": 200}[name] for name, tokens in served.items()}
    assert counts["ann"] * cost["ann"] == pytest.approx(counts["ben"] * cost["ben"], rel=0.1)


def test_a_weight_scales_the_share() -> None:
    queue, heavy, one = AdmissionQueue(), key("heavy", weight=3.0), replace(CAPACITY, max_running=1)
    for _ in range(300):
        queue.add(entry(ANN))
        queue.add(entry(heavy))
    served = serve(queue, one, 200)
    assert served["heavy"] / served["ann"] == pytest.approx(3.0, rel=0.05)


def test_idle_time_earns_nothing() -> None:
    queue, one = AdmissionQueue(), replace(CAPACITY, max_running=1)
    for _ in range(100):
        queue.add(entry(ANN))
    serve(queue, one, 50)
    for _ in range(100):
        queue.add(entry(BEN))
    served = serve(queue, one, 20)
    assert served["ben"] == pytest.approx(served["ann"], rel=0.25)


def test_priority_goes_before_the_share() -> None:
    queue, one = AdmissionQueue(), replace(CAPACITY, max_running=1)
    queue.add(entry(ANN))
    list(queue.take(one))
    waiting = [entry(BEN), entry(ANN, priority=-1), entry(ANN, priority=-2)]
    for item in waiting:
        queue.add(item)
    order = []
    queue.remove(next(iter(queue._running)))
    while queue.num_waiting:
        (started,) = queue.take(one)
        order.append(started)
        queue.remove(started)
    assert order == [waiting[2], waiting[1], waiting[0]]


def test_kv_limits_what_starts() -> None:
    queue = AdmissionQueue()
    long = [entry(ANN, tokens=60_000) for _ in range(2)]
    short = entry(ANN)
    for one in (*long, short):
        queue.add(one)
    assert list(queue.take(CAPACITY)) == [long[0]]  # the short one does not overtake
    queue.remove(long[0])
    assert list(queue.take(CAPACITY)) == [long[1], short]


def test_an_entry_that_never_fits_runs_alone() -> None:
    queue, huge = AdmissionQueue(), entry(ANN, tokens=10**6)
    queue.add(huge)
    assert list(queue.take(CAPACITY)) == [huge]


def test_a_reserved_share_stays_free() -> None:
    gold = key("gold", reserved=0.5)
    queue = AdmissionQueue(lambda: {"gold": 0.5})
    for _ in range(8):
        queue.add(entry(ANN))
    assert len(list(queue.take(CAPACITY))) == 2
    own = entry(gold)
    queue.add(own)
    assert own in list(queue.take(CAPACITY))
    full = replace(CAPACITY, max_waiting=0)
    assert queue.displaced(entry(gold), full) is not None
    assert queue.displaced(entry(ANN), full) is None


def test_a_full_queue_refuses_the_key_that_waits_most() -> None:
    queue = AdmissionQueue()
    flood = [entry(ANN) for _ in range(12)]
    for one in flood:
        queue.add(one)
    started = list(queue.take(CAPACITY))
    assert queue.displaced(entry(ANN), CAPACITY) is None
    assert queue.displaced(entry(BEN), CAPACITY) == [flood[-1]]
    flood[-1].is_displaceable = False
    assert queue.displaced(entry(BEN), CAPACITY) == [flood[-2]]
    assert not set(started) & set(queue.displaced(entry(BEN, choices=4), CAPACITY) or ())
    assert queue.displaced(entry(BEN, priority=1), CAPACITY) is None


def test_waiting_prompts_are_counted_in_tokens() -> None:
    queue = AdmissionQueue()
    for _ in range(4):
        queue.add(entry(ANN))
    list(queue.take(CAPACITY))
    assert queue.displaced(entry(ANN, tokens=80_000), CAPACITY) is not None  # alone
    queue.add(entry(ANN, tokens=40_000))
    assert queue.displaced(entry(ANN, tokens=20_000), CAPACITY) is None
    assert queue.displaced(entry(ANN, tokens=5_000), CAPACITY) is not None
