"""Runs the same conversations through all contenders in turns, so that load of the machine affects all of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.bench.contender import MeasuredSystem, Message
from paceline.bench.prompts import BenchPrompt
from paceline.bench.report import Measured, measure
from paceline.bench.trace import AnswerTimes
from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to run."""

    prompts: Sequence[BenchPrompt]
    sampling: SamplingParams
    """Sampling parameters. Prompt i has `seed + i` for every contender."""
    concurrency: int = 1
    system: str | None = None

    @property
    def waves(self) -> list[range]:
        """Indices of prompts that run concurrently."""
        count = len(self.prompts)
        return [range(i, min(i + self.concurrency, count)) for i in range(0, count, self.concurrency)]


async def compare(
    contenders: Sequence[MeasuredSystem], workload: Workload, clock: Clock, on_wave: Callable[[int], None]
) -> tuple[Measured, ...]:
    """Measure every contender. The first is the reference for text. `on_wave(n)` reports that n more conversations are done.

    The first contender changes with every wave. A wave ends with its last answer.
    """
    traces: list[list[AnswerTimes]] = [[] for _ in contenders]
    seconds = [0.0] * len(contenders)
    for contender in contenders:
        await _warm_up(contender, workload)
    for number, wave in enumerate(workload.waves):
        for turn in range(len(contenders)):
            i = (turn + number) % len(contenders)
            started = clock.now()
            traces[i] += await _run_wave(contenders[i], workload, wave)
            seconds[i] += clock.now() - started
            on_wave(len(wave))
    return tuple(
        measure(contender.name, some, spent, traces[0])
        for contender, some, spent in zip(contenders, traces, seconds, strict=True)
    )


async def _warm_up(contender: MeasuredSystem, workload: Workload) -> None:
    sampling = replace(workload.sampling, max_tokens=min(WARM_UP_TOKENS, workload.sampling.max_tokens), seed=0)
    await contender.answer([{"role": "user", "content": "Count from one to ten."}], sampling, "warm-up")


async def _run_wave(contender: MeasuredSystem, workload: Workload, wave: range) -> list[AnswerTimes]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_converse(contender, workload, i)) for i in wave]
    except ExceptionGroup as failures:  # one error is enough
        raise failures.exceptions[0] from None
    return [trace for task in tasks for trace in task.result()]


async def _converse(contender: MeasuredSystem, workload: Workload, index: int) -> list[AnswerTimes]:
    prompt, sampling = workload.prompts[index], workload.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + index)
    messages: list[Message] = [{"role": "system", "content": workload.system}] if workload.system else []
    traces: list[AnswerTimes] = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        trace = await contender.answer(messages, sampling, prompt.category)
        messages.append({"role": "assistant", "content": trace.text})
        traces.append(trace)
    return traces
