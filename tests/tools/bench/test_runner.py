import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import PacelineError
from paceline.core.request import SamplingParams
from paceline.tools.bench.report import Measured, Report
from paceline.tools.bench.runner import Message, Workload, compare
from paceline.tools.prompts.prompts import AnswerTimes, Arrival, BenchPrompt


class Scripted:
    """Answers with the last message in capitals, at `speed` tokens per second."""

    def __init__(self, name: str, clock: VirtualClock, log: list[str], speed: int = 1, wrong: str = "") -> None:
        self.name, self._clock, self._log, self._speed, self._wrong = name, clock, log, speed, wrong
        self.asked: list[tuple[list[Message], SamplingParams]] = []

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes:
        if category == "fails":
            raise PacelineError("no")
        if category != "warm-up":
            self._log.append(self.name)
            self.asked.append((list(messages), sampling))
        started = self._clock.now()
        text = messages[-1]["content"].upper()
        self._clock.advance(1.0)
        arrivals = [Arrival(self._clock.now(), 1)]
        for _ in range(4 // self._speed):
            self._clock.advance(1.0)
            arrivals.append(Arrival(self._clock.now(), self._speed, self._speed - 1, self._speed - 1))
        return AnswerTimes(category, started, tuple(arrivals), text.replace(self._wrong or "\0", "?"))


def run(
    prompts: list[BenchPrompt], concurrency: int = 1, wrong: str = ""
) -> tuple[tuple[Measured, ...], list[str], Scripted]:
    clock, log = VirtualClock(), []
    contenders = [Scripted("plain", clock, log), Scripted("fast", clock, log, speed=2, wrong=wrong)]
    workload = Workload(prompts, SamplingParams(seed=5), concurrency, system="be brief")
    done: list[int] = []
    measured = asyncio.run(compare(contenders, workload, clock, done.append))
    assert sum(done) == len(prompts) * 2
    return measured, log, contenders[1]


def test_contenders_alternate_and_the_first_changes() -> None:
    _, log, _ = run([BenchPrompt(("a",)), BenchPrompt(("b",)), BenchPrompt(("c",))])
    assert log == ["plain", "fast", "fast", "plain", "plain", "fast"]


def test_speeds_by_category_and_overall() -> None:
    (plain, fast), _, _ = run([BenchPrompt(("a",), "x"), BenchPrompt(("b",), "y")], concurrency=2)
    assert plain.overall.tokens_per_second == 1.0
    assert fast.overall.tokens_per_second == pytest.approx(5 / 3)
    assert list(plain.by_category) == ["x", "y"]
    assert fast.by_category["y"].tokens_per_round == 2.0
    assert fast.overall.alpha == 1.0


def test_turns_extend_the_conversation_and_seeds_count_prompts() -> None:
    _, _, fast = run([BenchPrompt(("hello", "more")), BenchPrompt(("other",))])
    messages, sampling = fast.asked[1]
    assert [m["content"] for m in messages] == ["be brief", "hello", "HELLO", "more"]
    assert [s.seed for _, s in fast.asked] == [5, 5, 6]
    assert sampling.max_tokens == SamplingParams().max_tokens


def test_difference_is_located() -> None:
    (plain, fast), _, _ = run([BenchPrompt(("abc",), "x"), BenchPrompt(("xyz",), "y")], wrong="Y")
    assert plain.identical == 2
    assert (fast.identical, fast.compared) == (1, 2)
    (difference,) = fast.differences
    assert (difference.answer, difference.category, difference.character) == (1, "y", 1)
    assert (difference.expected, difference.found) == ("YZ", "?Z")
    json = Report({"title": "t"}, (plain, fast)).to_json()
    assert json["contenders"][1]["differences"][0]["character"] == 1
    assert json["contenders"][1]["by_category"]["x"]["alpha_by_position"] == [1.0]


def test_error_is_raised_unchanged() -> None:
    with pytest.raises(PacelineError, match="no"):
        run([BenchPrompt(("a",)), BenchPrompt(("b",), "fails")], concurrency=2)
