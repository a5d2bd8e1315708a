import pytest

from paceline.core.sequence import BLOCK_SIZE
from paceline.policy.step import (
    MIN_PROMPT_ROWS,
    MIN_TOKENS,
    PromptPacer,
    admits,
    chunk_tokens,
    ends_inside_piece,
    padded_size,
    prompt_budget,
)


def test_the_limit_follows_the_measured_time_of_a_token() -> None:
    pacer = PromptPacer(seconds=0.2)
    assert pacer.max_tokens is None
    pacer.observe(MIN_TOKENS - 1, 100.0)  # a step that decodes
    assert pacer.max_tokens is None
    pacer.observe(256, 0.256)
    assert pacer.max_tokens == 200
    for _ in range(50):
        pacer.observe(64, 64.0)
    assert pacer.max_tokens == MIN_TOKENS


@pytest.mark.parametrize(
    ("num_computed", "num_left", "budget", "expected"),
    [
        (0, 100, 8192, 100),
        (0, 32_000, 8192, 8064),
        (0, 32_000, 8064, 8064),
        (8064, 23_936, 8192, 8064),
        (24_192, 7808, 8192, 7808),
        (384, 31_616, 8192, 7680),  # the next chunk begins at a whole piece
        (0, 32_000, 8063, 8063),  # too many sequences decode
        (2000, 30_000, 8192, 8192),  # 6,064 tokens to the end of the piece are too few for one
        (0, 9000, 500, 500),
    ],
)
def test_chunks_of_long_prompts_end_with_a_piece(num_computed: int, num_left: int, budget: int, expected: int) -> None:
    assert chunk_tokens(num_computed, num_left, budget, 8064) == expected
    assert chunk_tokens(num_computed, num_left, budget, None) == min(num_left, budget)


@pytest.mark.parametrize(
    ("num_computed", "num_left", "budget", "expected"),
    [
        (0, 7700, 7700, False),
        (0, 7700, 7699, True),
        (0, 7000, 492, False),  # short prompts have no pieces
        (0, 32_000, 8092, False),
        (0, 32_000, 8000, True),
        (384, 31_616, 8000, False),
    ],
)
def test_a_short_chunk_ends_inside_a_piece(num_computed: int, num_left: int, budget: int, expected: bool) -> None:
    assert ends_inside_piece(num_computed, num_left, budget, 8064) is expected


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
