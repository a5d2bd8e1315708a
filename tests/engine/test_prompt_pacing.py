from paceline.policy.step import PromptPacer
from tests.engine.harness import MODEL, PROMPT, request
from tests.exactness.suite import plain_text
from tests.fakes import run, tiny_engine


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
