import pytest

from paceline.engine.prompt_pacing import MIN_TOKENS, PromptPacer, chunk_tokens, cuts_piece
from tests.engine.harness import MODEL, PROMPT, request
from tests.exactness.suite import plain_text
from tests.fakes import run, tiny_engine


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
def test_a_short_chunk_cuts_a_piece(num_computed: int, num_left: int, budget: int, expected: bool) -> None:
    assert cuts_piece(num_computed, num_left, budget, 8064) is expected


def test_prompts_leave_time_for_sequences_that_decode() -> None:
    engine = tiny_engine(MODEL, max_batched_tokens=128, prefix_caching=False)
    engine.add(request("decodes", PROMPT, max_tokens=60))
    for _ in range(3):
        engine.step()
    engine.scheduler.limit_prompts(10)
    engine.add(request("long", [i % 40 for i in range(60)], max_tokens=4))
    engine.add(request("other", [i % 39 for i in range(60)], max_tokens=4))
    schedule = engine.scheduler.schedule()
    assert sorted(item.num_tokens for item in schedule.items) == [1, 10]


def test_texts_are_the_same_with_any_limit() -> None:
    requests = [request(f"r{i}", [j % 40 for j in range(5 + 9 * i)], max_tokens=12, seed=i) for i in range(6)]
    engine = tiny_engine(MODEL, max_batched_tokens=64)
    engine._committer._pacer = PromptPacer(seconds=0.0)
    assert run(engine, requests, arrivals=1).tokens == plain_text(MODEL, requests)
