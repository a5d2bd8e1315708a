import pytest

from paceline.core.sequence import BLOCK_SIZE
from paceline.policy.step import (
    CHEAP_ROWS,
    LEAST_MEASURED,
    MIN_PROMPT_ROWS,
    MIN_TOKENS,
    Objectives,
    PromptClaim,
    PromptPacer,
    PromptRoom,
    admits,
    padded_size,
    prompt_budget,
    prompt_room,
)


def rows_of(pacer: PromptPacer, num_decoding: int) -> int:
    room = pacer.room(num_decoding, ())
    assert room is not None
    return round(room.rows)


def test_the_pacer_subtracts_what_decoding_costs() -> None:
    pacer = PromptPacer(Objectives(ttft=1.0, tpot=0.2))
    assert pacer.room(16, ()) is None
    pacer.observe(16, 0, LEAST_MEASURED - 1, 100.0)
    assert pacer.room(16, ()) is None
    pacer.observe(16, 0, 0, 0.1)  # a step that only decodes
    pacer.observe(16, 0, 100, 0.2)
    assert rows_of(pacer, 16) == 100
    assert rows_of(pacer, 0) == 200
    for _ in range(50):
        pacer.observe(16, 0, 64, 64.0)
    assert rows_of(pacer, 16) == MIN_TOKENS


def test_few_prompt_rows_of_a_gpu_show_nothing() -> None:
    pacer = PromptPacer(Objectives(ttft=1.0, tpot=0.2), least_rows=CHEAP_ROWS)
    pacer.observe(1, 0, 16, 0.0044)  # the time of reading the weights
    assert pacer.room(1, ()) is None
    pacer.observe(1, 0, 0, 0.0044)
    pacer.observe(1, 0, 2000, 0.0444)
    assert rows_of(pacer, 1) == 9780


def test_rows_of_drafts_do_not_make_prompts_look_slow() -> None:
    pacer = PromptPacer(Objectives(ttft=1.0, tpot=0.2))
    pacer.observe(16, 64, 0, 0.5)  # not the cost of decoding
    pacer.observe(16, 64, 80, 0.16)
    assert rows_of(pacer, 0) == 200
    assert rows_of(pacer, 16) == 184  # decoding rows cost as much as those of prompts until they are measured


def test_the_pacer_learns_what_a_token_of_context_costs() -> None:
    pacer = PromptPacer(Objectives(ttft=1.0, tpot=0.2))
    for step in range(60):
        context = 100.0 * step
        pacer.observe(0, 0, 64, 64 * 0.001 * (1.0 + 0.002 * context), context)
    room = pacer.room(0, ())
    assert room is not None
    assert room.rows == pytest.approx(200, rel=0.05)
    assert room.context_weight == pytest.approx(0.002, rel=0.05)
    for step in range(600):  # a machine that is twice as slow
        context = 100.0 * (step % 60)
        pacer.observe(0, 0, 64, 64 * 0.002 * (1.0 + 0.002 * context), context)
    room = pacer.room(0, ())
    assert room is not None
    assert room.rows == pytest.approx(100, rel=0.05)
    assert room.context_weight == pytest.approx(0.002, rel=0.05)


def test_rows_late_in_a_prompt_take_more_of_the_room() -> None:
    room = PromptRoom(100, 0.001)
    assert (room.cost(10, 0), room.cost(10, 1000)) == pytest.approx((10.05, 20.05))
    for context in (0, 100, 7000):
        most = room.most(100, context)
        assert room.cost(most, context) <= 100 < room.cost(most + 1, context)
    assert (room.most(0, 0), room.most(-5, 7000), PromptRoom(100).most(40, 7000)) == (0, 0, 40)


@pytest.mark.parametrize(
    ("decoding", "claims", "rows"),
    [
        (0.05, [], 150),
        (0.05, [(10_000, 0.0)], 150),
        (0.3, [], 100),  # decoding alone misses the objective: a quarter of the time
        (0.3, [(200, 0.0)], 100),  # 200 * 0.3 / (1 - 0.2) = 75 are enough
        (0.3, [(400, 0.0)], 200),
        (0.3, [(400, 0.0), (50, 0.0)], 245),
        (0.3, [(400, 0.3)], 100),  # half of the time is not enough
        (0.3, [(7000, 0.0)], 100),
    ],
)
def test_rows_follow_the_objectives(decoding: float, claims: list[tuple[int, float]], rows: int) -> None:
    objectives, waiting = Objectives(ttft=1.0, tpot=0.2), [PromptClaim(count, 0, waited) for count, waited in claims]
    assert prompt_room(objectives, decoding, 0.001, 0.0, waiting).rows == pytest.approx(rows, abs=1)


@pytest.mark.parametrize(
    ("num_decoding", "num_waiting", "budget"),
    [(128, 300, 384), (128, 4000, 4000), (128, 90_000, 8192), (600, 300, 300), (600, 10, MIN_PROMPT_ROWS)],
)
def test_prompt_rows_grow_with_those_that_wait(num_decoding: int, num_waiting: int, budget: int) -> None:
    assert prompt_budget(num_decoding, num_waiting) == budget


def test_a_mixed_step_has_room_for_a_block_of_a_prompt() -> None:
    assert MIN_PROMPT_ROWS == BLOCK_SIZE


def test_passes_are_padded_to_few_sizes() -> None:
    assert [padded_size(count) for count in (1, 2, 3, 5, 64, 65, 129)] == [1, 2, 4, 8, 64, 128, 192]


@pytest.mark.parametrize(("need", "running", "expected"), [(10, 3, True), (11, 3, False), (10, 4, False)])
def test_a_sequence_joins_if_there_is_room(need: int, running: int, expected: bool) -> None:
    assert admits(need, 10, running, 4) is expected
