import random
from collections.abc import Sequence as Seq

import pytest

from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import BLOCK_SIZE, Sequence, Status
from paceline.engine.scheduler import Scheduler
from paceline.engine.step.step import Schedule
from paceline.kv.block_tables import BlockTables, blocks_for


def sequence(
    number: int, prompt: int | Seq[int], *, depth: int = 0, priority: int = 0, arrival: float = 0.0
) -> Sequence:
    """`prompt`: token ids, or how many of them, unlike those of any other sequence."""
    ids = [1000 * (number + 1) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Sequence(
        id=number,
        request_id=f"r{number}",
        ids=ids,
        num_prompt=len(ids),
        sampling=SamplingParams(),
        speculation=SpeculationParams(),
        seed=0,
        priority=priority,
        arrival=arrival,
        depth=depth,
    )


def scheduler(
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    rows: int = 64,
    prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(BlockTables(num_blocks, prefix_caching), max_num_seqs, rows)


def commit(plan: Schedule, tables: BlockTables, accepted: int = 0) -> None:
    """What the engine does after a pass in which every draft had its first `accepted` tokens accepted."""
    for item in plan.items:
        one, completes = item.sequence, item.completes
        one.num_computed += item.num_tokens
        if completes:
            kept = min(accepted, item.num_draft)
            one.num_computed += kept
            one.ids += [7] * (kept + 1)
            tables.shrink(one.id, one.num_computed)
        tables.publish(one.id, one.ids, one.num_computed)


def step(part: Scheduler, accepted: int = 0) -> Schedule:
    plan = part.schedule()
    commit(plan, part.tables, accepted)
    return plan


def rows_of(plan: Schedule) -> dict[int, int]:
    return {item.sequence.id: item.num_tokens for item in plan.items}


def drafts_of(plan: Schedule) -> dict[int, int]:
    return {item.sequence.id: item.num_draft for item in plan.items}


def running(part: Scheduler, one: Sequence, num_computed: int) -> Sequence:
    """Put a sequence where admission would not have let it: mid-flight, holding just the blocks it computed."""
    part.tables.open(one.id, one.ids, "")
    assert part.tables.grow(one.id, num_computed)
    one.num_computed, one.status = num_computed, Status.RUNNING
    part.running.append(one)
    part.running.sort(key=lambda other: (other.priority, other.arrival, other.id))
    return one


def test_rank_is_priority_then_arrival_then_number() -> None:
    part = scheduler(max_num_seqs=2)
    for one in (
        sequence(0, 8, arrival=5.0),
        sequence(1, 8, arrival=1.0),
        sequence(2, 8, priority=-1, arrival=9.0),
        sequence(3, 8, arrival=1.0),
    ):
        part.add(one)
    assert [one.id for one in part.waiting] == [2, 1, 3, 0]
    assert list(rows_of(step(part))) == [2, 1]
    assert [one.id for one in part.running] == [2, 1]
    assert [one.id for one in part.waiting] == [3, 0]


def test_an_idle_scheduler_plans_nothing() -> None:
    part = scheduler()
    assert not part.has_work
    assert part.schedule() == Schedule(())


def test_a_late_arrival_of_higher_rank_runs_before_those_already_running() -> None:
    part = scheduler()
    part.add(sequence(0, 8, arrival=1.0))
    step(part)
    part.add(sequence(1, 8, priority=-1, arrival=2.0))
    step(part)
    assert [one.id for one in part.running] == [1, 0]


def test_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    part = scheduler(rows=32)
    part.add(sequence(0, 80))
    plans = [step(part) for _ in range(4)]
    assert [rows_of(plan)[0] for plan in plans] == [32, 32, 16, 1]
    assert part.running[0].num_output == 2


def test_a_chunk_leaves_a_row_for_every_running_sequence() -> None:
    part = scheduler(rows=16)
    long = sequence(0, 100, arrival=1.0)
    others = [sequence(i, 2, arrival=0.0) for i in range(1, 4)]
    for one in others:
        part.add(one)
    step(part)
    long.priority = -1  # ranked first, and still it must not take everything
    part.add(long)
    assert rows_of(step(part)) == {1: 1, 2: 1, 3: 1, 0: 13}
    for _ in range(3):
        assert rows_of(step(part)) == {0: 13, 1: 1, 2: 1, 3: 1}


def test_row_and_sequence_limits_are_never_exceeded() -> None:
    part = scheduler(max_num_seqs=3, rows=20)
    for i in range(6):
        part.add(sequence(i, 15, depth=4))
    for _ in range(10):
        plan = step(part)
        assert sum(item.num_tokens + item.num_draft for item in plan.items) <= 20
        assert len(plan.items) <= 3


def test_full_is_a_pass_that_prompts_leave_no_row_for_drafts() -> None:
    part = scheduler(rows=20)
    part.add(sequence(0, 4, depth=4))
    step(part)
    assert not part.is_full(part.prompt_rows())
    part.add(sequence(1, 40))
    while part.is_full(part.prompt_rows()):
        assert drafts_of(step(part)) == {0: 0, 1: 0}
    assert rows_of(step(part)) == {0: 1, 1: 40 - 2 * 19}
    part.add(sequence(2, 40))
    part.max_num_seqs = 2  # a sequence that cannot be admitted takes no rows
    assert part.prompt_rows() == 0
    assert not part.is_full(part.prompt_rows())


def test_completes_tells_the_pass_that_reaches_the_newest_token() -> None:
    part = scheduler(rows=16)
    part.add(sequence(0, 20))
    first = part.schedule()
    assert not first.items[0].completes
    commit(first, part.tables)
    assert part.schedule().items[0].completes


def test_preempts_the_lowest_ranked_and_keeps_its_tokens() -> None:
    part = scheduler(num_blocks=6)
    high, low = sequence(0, 16), sequence(1, 16)
    part.add(high)
    part.add(low)
    step(part)
    for _ in range(40):  # both grow until six blocks do not hold them
        plan = step(part)
        if plan.preempted:
            break
    assert plan.preempted == (low,)
    assert list(rows_of(plan)) == [0]
    assert low.status is Status.WAITING
    assert low.num_computed == 0
    assert low.num_output > 30
    assert low.id not in part.tables
    assert part.waiting == [low]
    assert part.num_preemptions == 1
    part.tables.pool.check()


def test_the_lowest_ranked_gives_up_its_own_place_rather_than_a_better_ones() -> None:
    part = scheduler(num_blocks=2)
    low = running(part, sequence(1, 16, priority=1), 16)
    running(part, sequence(0, 11), 10)
    low.ids.append(7)
    plan = part.schedule()
    assert rows_of(plan) == {0: 1}
    assert plan.preempted == (low,)


def test_a_pass_that_preempts_admits_no_sequence() -> None:
    part = scheduler(num_blocks=6, max_num_seqs=2)
    running(part, sequence(0, 17), 16)
    low = running(part, sequence(1, 81, priority=2), 80)
    part.add(sequence(2, 4, priority=1))
    plan = part.schedule()
    assert plan.preempted == (low,)
    assert rows_of(plan) == {0: 1}
    assert rows_of(part.schedule()) == {0: 1, 2: 4}


def test_a_preempted_sequence_comes_back_on_its_cached_prefix() -> None:
    part = scheduler(num_blocks=8)
    high, low = sequence(0, 16), sequence(1, 40)
    part.add(high)
    part.add(low)
    step(part)
    part._preempt(low)
    length = len(low.ids)
    plan = step(part)
    assert rows_of(plan)[1] == length - 32
    assert low.num_cached == 0, "its own earlier work is no saving to report"


def test_speculation_never_preempts() -> None:
    part = scheduler(num_blocks=4)
    for i in range(2):
        part.add(sequence(i, 8))
    step(part)
    for one in part.running:
        one.depth = 100
    plan = part.schedule()
    assert plan.preempted == ()
    # Two blocks with nine tokens each and two free: the first takes those and its own seven slots, the second its own.
    assert drafts_of(plan) == {0: 7 + 2 * BLOCK_SIZE, 1: 7}
    assert part.tables.pool.num_free == 0


def test_drafts_are_cut_to_the_rows_left() -> None:
    part = scheduler(rows=10)
    for i in range(3):
        part.add(sequence(i, 2, depth=5))
    plan = part.schedule()
    assert rows_of(plan) == {0: 2, 1: 2, 2: 2}
    assert drafts_of(plan) == {0: 4, 1: 0, 2: 0}


def test_waiting_sequences_come_before_drafts() -> None:
    part = scheduler(rows=16)
    part.add(sequence(0, 2))
    step(part)
    part.running[0].depth = 5
    part.add(sequence(1, 15))
    assert drafts_of(part.schedule()) == {0: 0, 1: 0}


def test_a_chunk_that_does_not_reach_the_end_gets_no_drafts() -> None:
    part = scheduler(rows=16)
    part.add(sequence(0, 20, depth=4))
    assert drafts_of(step(part)) == {0: 0}
    assert drafts_of(step(part)) == {0: 4}


def test_rows_that_a_preemption_leaves_over_are_no_drafts_of_an_unfinished_chunk() -> None:
    part = scheduler(num_blocks=3, rows=8)
    running(part, sequence(0, 40, depth=4), 16)
    low = running(part, sequence(1, 32), 31)
    plan = part.schedule()
    assert plan.preempted == (low,)
    assert rows_of(plan) == {0: 7}
    assert drafts_of(plan) == {0: 0}


def test_depth_zero_reserves_nothing() -> None:
    part = scheduler()
    part.add(sequence(0, 15))
    step(part)
    plan = part.schedule()
    assert drafts_of(plan) == {0: 0}
    assert len(part.tables.blocks(0)) == 1


def test_rolled_back_drafts_leave_no_blocks_behind() -> None:
    part = scheduler(num_blocks=8)
    part.add(sequence(0, 16, depth=40))
    for accepted in (0, 3, 40, 0):
        plan = step(part, accepted)
        assert plan.items[0].num_draft == 40
        assert len(part.tables.blocks(0)) == blocks_for(part.running[0].num_computed)


def test_a_sibling_waits_until_its_leader_has_computed_the_prompt() -> None:
    part = scheduler(rows=32)
    prompt = range(48)
    leader = sequence(0, prompt)
    siblings = [sequence(i, prompt) for i in (1, 2)]
    for one in siblings:
        one.leader = leader
    other = sequence(3, 8)
    for one in (leader, *siblings, other):
        part.add(one)
    assert rows_of(step(part)) == {0: 32}
    assert rows_of(step(part)) == {0: 16, 3: 8}  # the stranger does not wait behind the siblings
    plan = step(part)
    assert rows_of(plan) == {0: 1, 3: 1, 1: 16, 2: 14}
    assert [one.num_cached for one in siblings] == [32, 32]


def test_a_sibling_does_not_wait_for_a_leader_that_is_gone() -> None:
    part = scheduler()
    leader, sibling = sequence(0, range(40)), sequence(1, range(40))
    sibling.leader = leader
    part.add(leader)
    part.add(sibling)
    part.remove(leader)
    assert rows_of(part.schedule()) == {1: 40}


def test_a_prompt_that_another_is_computing_is_computed_once() -> None:
    part, prompt = scheduler(rows=64), list(range(100))
    first, second = sequence(0, prompt), sequence(1, prompt)
    other = sequence(2, [*range(30), *range(900, 910)])
    for one in (first, second, other):
        part.add(one)
    assert rows_of(step(part)) == {0: 64}
    # The rest of the first one's prompt, which holds another block of the second's; of the third all that is shared is there
    assert rows_of(step(part)) == {0: 36, 2: 24}
    assert rows_of(step(part)) == {0: 1, 1: 4, 2: 1}
    assert (first.num_cached, second.num_cached, other.num_cached) == (0, 96, 16)


def test_who_waits_for_another_s_prompt_keeps_the_place_in_the_queue() -> None:
    part, prompt = scheduler(max_num_seqs=2), list(range(40))
    first, second, other = sequence(0, prompt), sequence(1, prompt), sequence(2, 10)
    for one in (first, second, other):
        part.add(one)
    assert rows_of(step(part)) == {0: 40}
    assert rows_of(step(part)) == {0: 1, 1: 8}
    assert part.waiting == [other]


@pytest.mark.parametrize("apart", ["salt", "rank", "short", "no caching"])
def test_a_sequence_does_not_wait_for_a_prefix_it_cannot_share(apart: str) -> None:
    part = scheduler(prefix_caching=apart != "no caching")
    prompt = range(BLOCK_SIZE if apart == "short" else 20)
    first, second = sequence(0, prompt), sequence(1, prompt)
    if apart == "salt":
        second.cache_salt = "own"
    if apart == "rank":
        running(part, first, 0)
        second.priority = -1
    else:
        part.add(first)
    part.add(second)
    assert rows_of(step(part)) == {0: len(prompt), 1: len(prompt)}


def test_prefix_hits_count_towards_computed_and_not_towards_the_budget() -> None:
    part = scheduler(rows=48)
    part.add(sequence(0, range(48)))
    step(part)
    part.remove(part.running[0])
    again = sequence(1, [*range(48), 900, 901])
    part.add(again)
    other = sequence(2, 46)
    part.add(other)
    plan = part.schedule()
    assert again.num_computed == again.num_cached == 48
    assert rows_of(plan) == {1: 2, 2: 46}
    assert plan.items[0].completes


def test_shared_blocks_need_no_room_twice() -> None:
    part = scheduler(num_blocks=8, rows=128)
    part.add(sequence(0, range(64)))
    step(part)
    # Five of eight blocks are taken (the last by the next token's row); three more would not hold 64 tokens.
    part.add(sequence(1, [*range(64), 900]))
    assert 1 in rows_of(step(part))
    assert part.tables.blocks(1)[:4] == part.tables.blocks(0)[:4]


def test_a_cached_prefix_without_a_holder_takes_blocks() -> None:
    part = scheduler(num_blocks=8, rows=128)
    part.add(sequence(0, range(64)))
    step(part)
    part.remove(part.running[0])
    part.add(sequence(1, 20))
    step(part)
    part.add(sequence(2, [*range(64), 900]))
    # 6 free, 4 of them the prefix: 5 blocks, one to grow into and one for the other sequence are 7
    assert set(rows_of(part.schedule())) == {1}


def test_admission_keeps_a_block_to_grow_for_every_sequence() -> None:
    part = scheduler(num_blocks=5)
    part.add(sequence(0, 32))
    step(part)
    part.add(sequence(1, 16))
    assert set(rows_of(step(part))) == {0}  # 3 free - 1 for its next row: 1 + 1 + 1 do not fit in 2
    part.remove(part.running[0])
    assert set(rows_of(step(part))) == {1}


def test_a_sequence_without_room_is_not_about_to_be_admitted() -> None:
    part = scheduler(num_blocks=8, max_num_seqs=3)
    part.add(sequence(0, 4 * BLOCK_SIZE))
    assert part.may_admit
    step(part)
    assert not part.may_admit  # no sequence waits
    part.add(sequence(1, 3 * BLOCK_SIZE))
    assert not part.may_admit
    assert rows_of(step(part)) == {0: 1}
    part.add(sequence(2, BLOCK_SIZE - 1))  # would fit, and is not let in before who came first
    assert not part.may_admit
    part.remove(part.running[0])
    assert part.may_admit


def test_blocks_that_are_held_ahead_of_the_text_are_given_back_for_who_waits() -> None:
    part = scheduler(num_blocks=8, max_num_seqs=2)
    part.add(sequence(0, 2 * BLOCK_SIZE))
    step(part)
    part.tables.grow(0, 6 * BLOCK_SIZE)
    part.add(sequence(1, 2 * BLOCK_SIZE))
    assert part.may_admit
    part.tables.shrink(0, part.running[0].num_computed)
    assert set(rows_of(step(part))) == {0, 1}


def test_admission_needs_a_free_slot() -> None:
    part = scheduler(max_num_seqs=1)
    part.add(sequence(0, 4))
    step(part)
    part.add(sequence(1, 4))
    assert not part.may_admit


def test_removing_frees_blocks_in_either_queue() -> None:
    part = scheduler(num_blocks=4, max_num_seqs=1)
    running, waiting = sequence(0, 20), sequence(1, 20)
    part.add(running)
    part.add(waiting)
    step(part)
    part.remove(waiting)
    part.remove(running)
    assert not part.has_work
    assert running.is_finished
    assert waiting.is_finished
    assert part.tables.pool.num_free == 4


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_keeps_every_promise_and_finishes(seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 6)
    part = scheduler(rng.randint(7, 24), max_num_seqs, rng.randint(max_num_seqs, 40), rng.random() < 0.7)
    pending = [
        sequence(
            i, rng.choice((range(1, rng.randint(2, 60)), rng.randint(1, 60))), priority=rng.randint(0, 2), arrival=i
        )
        for i in range(12)
    ]
    goal = {one.id: len(one.ids) + rng.randint(1, 30) for one in pending}
    alive: list[Sequence] = []
    for _ in range(3000):
        if pending and rng.random() < 0.3:
            alive.append(pending.pop())
            part.add(alive[-1])
        for one in part.running:
            one.depth = rng.randint(0, 6) if one.num_uncomputed == 1 else 0
        before = {one.id: one for one in part.running}
        plan = part.schedule()
        assert sum(item.num_tokens + item.num_draft for item in plan.items) <= part.max_batched_tokens
        assert len(part.running) <= max_num_seqs
        assert all(item.num_tokens >= 1 for item in plan.items)
        decoding = {one.id for one in part.running if one.num_uncomputed == 1}
        assert decoding <= set(rows_of(plan)) <= {one.id for one in part.running}
        assert plan.items or not part.running
        assert not {one.id for one in plan.preempted} & {one.id for one in part.running}
        if plan.preempted:
            worst_kept = max(((one.priority, one.arrival) for one in part.running), default=(-1, 0.0))
            assert all((one.priority, one.arrival) > worst_kept for one in plan.preempted)
            assert all(one.id in before for one in plan.preempted)
        for item in plan.items:
            end = item.sequence.num_computed + item.num_tokens + item.num_draft
            assert part.tables.capacity(item.sequence.id) >= end
        for one in plan.preempted:
            one.depth = 0
        commit(plan, part.tables, rng.randint(0, 4))
        for one in [one for one in part.running if len(one.ids) >= goal[one.id]]:
            part.remove(one)
            alive.remove(one)
        part.tables.pool.check()
        if not pending and not alive:
            break
    assert not alive, "some sequence never finished"
    assert part.tables.pool.num_free == part.tables.pool.num_blocks
