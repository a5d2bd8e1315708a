from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from paceline.core.request import ValidatedRequest
from paceline.engine.engine import Engine
from paceline.policy.step import Objectives, PromptPacer, PromptRoom
from paceline.speculation import SequenceProgress
from tests.engine.harness import MODEL, PROMPT, engine_of, oracle, plain_tokens, request
from tests.exactness.suite import plain_text
from tests.fakes import StepClock, run, tiny_engine


def test_prompts_leave_time_for_sequences_that_decode() -> None:
    engine = tiny_engine(MODEL, max_batched_tokens=128, prefix_caching=False)
    engine.add(request("decodes", PROMPT, max_tokens=60))
    for _ in range(3):
        engine.step()
    engine.scheduler.limit_prompts(PromptRoom(10))
    engine.add(request("long", [i % 40 for i in range(60)], max_tokens=4))
    engine.add(request("other", [i % 39 for i in range(60)], max_tokens=4))
    schedule = engine.scheduler.schedule()
    assert [item.num_tokens for item in schedule.items] == [1, 10]


def test_rows_late_in_a_prompt_take_more_time() -> None:
    engine = tiny_engine(MODEL, max_batched_tokens=128, prefix_caching=False)
    engine.add(request("decodes", PROMPT, max_tokens=60))
    engine.step()
    engine.add(request("long", [i % 40 for i in range(200)], max_tokens=4))
    pieces = []
    for _ in range(3):
        engine.scheduler.limit_prompts(PromptRoom(60, 0.01))
        pieces.append(engine.scheduler.schedule().items[-1].num_tokens)
        engine.step()
        engine.scheduler.limit_prompts(PromptRoom(60, 0.01))
    assert pieces[0] > pieces[-1] >= 16


def test_texts_are_the_same_with_any_limit() -> None:
    requests = [request(f"r{i}", [j % 40 for j in range(5 + 9 * i)], max_tokens=12, seed=i) for i in range(6)]
    engine = tiny_engine(MODEL, max_batched_tokens=64)
    engine._committer._pacer = PromptPacer(Objectives(ttft=1e-9, tpot=1e-9))
    assert run(engine, requests, arrivals=1).tokens == plain_text(MODEL, requests)


def first_tokens(engine: Engine, requests: Iterable[ValidatedRequest]) -> list[str]:
    """The requests in the order of their first tokens. One request arrives in each step."""
    arrivals, order = iter(requests), list[str]()
    while engine.has_work or not order:
        if (arrived := next(arrivals, None)) is not None:
            engine.add(arrived)
        order += [output.request_id for output in engine.step() if output.request_id not in order]
    return order


def test_short_prompts_pass_a_long_one_which_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.policy.prompt_line.SHORT_ROWS", 16)
    requests = [request("decodes", PROMPT, max_tokens=60), request("long", [i % 40 for i in range(180)], max_tokens=4)]
    requests += [request(f"short{i}", [(i + j) % 40 for j in range(16)], max_tokens=1) for i in range(40)]

    def engine() -> Engine:
        return tiny_engine(MODEL, max_batched_tokens=21, max_num_seqs=20, prefix_caching=False)

    order = first_tokens(engine(), requests)
    assert order[0] == "decodes"
    assert 10 <= order.index("long") < 40  # of 42
    assert run(engine(), requests, arrivals=1).tokens == plain_text(MODEL, requests)


def test_tenants_get_first_tokens_in_turn() -> None:
    many = [replace(request(f"many{i}", [i, *range(30)], max_tokens=2), tenant="a") for i in range(8)]
    few = [replace(request(f"few{i}", [i, *range(31)], max_tokens=2), tenant="b") for i in range(2)]
    engine = tiny_engine(MODEL, max_batched_tokens=32, max_num_seqs=16, prefix_caching=False)
    for added in (*many, *few):
        engine.add(added)
    assert {"few0", "few1"} <= set(first_tokens(engine, [])[:6])


def test_drafts_wait_while_prompts_fill_the_steps() -> None:
    drafts = oracle(plain_tokens(max_tokens=40))
    engine = engine_of(drafts, max_batched_tokens=128, prefix_caching=False)
    engine.add(request("r", PROMPT, max_tokens=40))
    for _ in range(3):
        engine.step()
    engine._committer._pacer = PromptPacer(Objectives(ttft=1e-9, tpot=1e-9))
    engine.add(request("long", [i % 40 for i in range(200)], max_tokens=1))
    drafted = []
    while engine.has_work:
        drafted += [(output.drafted, output.request_id) for output in engine.step()]
    first = next(number for number, (_, name) in enumerate(drafted) if name == "long")
    assert first >= 4
    assert all(count == 0 for count, _ in drafted[: first - 1])  # the last piece leaves time for drafts
    assert any(count for count, name in drafted[first + 1 :])


def test_time_of_drafting_does_not_make_prompts_look_slow() -> None:
    """Steps that are full of prompts draft nothing."""
    clock, drafts = StepClock(), oracle(plain_tokens(max_tokens=40))
    guess = drafts.guess

    def slow(progress: SequenceProgress) -> tuple[list[int], list[int]]:
        clock.pass_time(10.0)
        return guess(progress)

    def rows(of: Callable[[SequenceProgress], tuple[list[int], list[int]]]) -> float:
        drafts.guess = of
        engine = engine_of(drafts, max_batched_tokens=128, prefix_caching=False, clock=clock)
        engine.add(request("r", PROMPT, max_tokens=40))
        engine.step()
        engine.add(request("prompt", [i % 40 for i in range(20)], max_tokens=1))
        engine.step()
        room = engine.scheduler._room
        assert room is not None
        return room.rows

    assert rows(slow) == pytest.approx(rows(guess), rel=0.2)
