"""The ring of samples."""

from paceline.gateway.sessions.samples import SampleRing


def add(ring: SampleRing, prompt: int = 3, output: int = 2) -> None:
    ring.add(range(prompt), range(output), (1,), 2, 2, "tenant", "chat")


def test_samples_are_numbered_and_read_from_a_number_on() -> None:
    ring = SampleRing(10, 1000)
    for _ in range(3):
        add(ring)
    batch = ring.after(1)
    assert [sample.number for sample in batch.samples] == [2, 3]
    assert (batch.last, batch.epoch) == (3, ring.epoch)
    assert ring.after(3).samples == ()
    assert ring.after(3).last == 3


def test_the_number_of_samples_is_bounded() -> None:
    ring = SampleRing(2, 1000)
    for _ in range(5):
        add(ring)
    assert [sample.number for sample in ring.after(0).samples] == [4, 5]
    assert (ring.num_added, ring.num_dropped, ring.num_tokens) == (5, 3, 10)


def test_the_number_of_tokens_is_bounded() -> None:
    ring = SampleRing(100, 12)
    for _ in range(4):
        add(ring)  # 5 tokens each
    assert [sample.number for sample in ring.after(0).samples] == [3, 4]
    assert ring.num_tokens == 10
    add(ring, prompt=20)
    assert (len(ring), ring.num_tokens) == (0, 0)


def test_a_sample_that_a_learner_received_is_not_counted_as_dropped() -> None:
    ring = SampleRing(2, 1000)
    add(ring)
    add(ring)
    ring.after(0)
    add(ring)
    assert ring.num_dropped == 0
    add(ring)
    add(ring)
    assert ring.num_dropped == 1


def test_an_answer_is_bounded_and_the_next_call_continues() -> None:
    ring = SampleRing(10, 1000)
    for _ in range(5):
        add(ring)
    first = ring.after(0, max_tokens=11)
    assert [sample.number for sample in first.samples] == [1, 2]
    assert [sample.number for sample in ring.after(first.last, max_tokens=1).samples] == [3]


def test_a_tenant_has_one_name_in_a_process_and_another_in_the_next() -> None:
    one, other = SampleRing(1, 1), SampleRing(1, 1)
    assert one.tenant("key") == one.tenant("key") != one.tenant("key 2")
    assert one.tenant("key") != other.tenant("key")
    assert "key" not in one.tenant("key")
    assert one.epoch != other.epoch
