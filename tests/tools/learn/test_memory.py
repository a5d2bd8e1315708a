from paceline.tools.learn.memory import MemoryLimits, SampleMemory, balanced, is_held_out
from tests.tools.learn.fakes import sample


def test_no_prompt_is_trained_on_and_held_out() -> None:
    memory = SampleMemory(MemoryLimits(100_000, held_out=0.25))
    memory.add(sample(number % 50) for number in range(200))
    trained, held = ({one.prompt for one in part} for part in (memory.training(), memory.held_out()))
    assert trained
    assert held
    assert not trained & held


def test_the_share_of_held_out_samples_follows_the_setting() -> None:
    count = sum(is_held_out(sample(number), 0.125) for number in range(2000))
    assert 180 < count < 320
    assert not any(is_held_out(sample(number), 0.0) for number in range(50))


def test_memory_is_bounded() -> None:
    memory = SampleMemory(MemoryLimits(1000, held_out=0.2))
    for number in range(500):
        memory.add([sample(number)])
    assert memory.num_tokens <= 1000 + 1000 + 200
    assert memory.num_seen == 500


def test_a_training_replays_older_samples() -> None:
    memory = SampleMemory(MemoryLimits(400, held_out=0.0, replay=0.25))
    memory.add(sample(number) for number in range(60))
    chosen = memory.training()
    newest = [one.number for one in chosen if one.number >= 40]
    assert newest == list(range(40, 60))
    older = [one.number for one in chosen if one.number < 40]
    assert 6 <= len(older) <= 7  # a quarter of all tokens, in whole samples


def test_new_tokens_count_what_can_be_trained_on() -> None:
    memory = SampleMemory(MemoryLimits(10_000, held_out=0.0))
    memory.add([sample(1), sample(2)])
    assert memory.new_tokens == 40
    memory.forget_new()
    assert memory.new_tokens == 0


def test_one_tenant_of_several_has_a_bounded_share() -> None:
    many = [sample(number, tenant="loud") for number in range(90)]
    few = [sample(number, tenant="quiet") for number in range(100, 110)]
    kept = balanced([*many, *few], 0.5)
    assert sum(one.tenant == "loud" for one in kept) == 50
    assert [one.number for one in kept if one.tenant == "loud"] == list(range(40, 90))
    assert sum(one.tenant == "quiet" for one in kept) == 10
    assert balanced(many, 0.5) == many
