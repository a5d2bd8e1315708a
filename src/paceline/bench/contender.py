"""Contenders: systems that answer a conversation and report when each token arrived."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.bench.trace import AnswerTimes, Arrival
from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.bench.profiling.recorder import Recorder
    from paceline.engine.llm import LLM


Message = Mapping[str, str]


class MeasuredSystem(Protocol):
    """A system to measure."""

    name: str

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes: ...


class EngineContender:
    """An engine in this process, with speculation on or off."""

    def __init__(self, name: str, llm: "LLM", speculative: bool, clock: Clock) -> None:
        self.name = name
        self._llm = llm
        self._speculative = speculative
        self._clock = clock

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes:
        arrivals: list[Arrival] = []
        ids: list[int] = []
        text = ""
        started = self._clock.now()
        # A salt per contender: contenders do not share the prefix cache.
        stream = self._llm.astream(
            messages,
            sampling,
            speculation={"enabled": self._speculative},
            category=category,
            cache_salt=f"bench/{self.name}",
        )
        async for output in stream:
            arrivals.append(Arrival.of(output, self._clock.now()))
            ids += output.tokens
            text += output.text
        return AnswerTimes(category, started, tuple(arrivals), text, tuple(ids))


class ProfiledContender:
    """Labels the recorded rounds with the contender's name. Contenders run in sequence, and the warm-up is not recorded."""

    def __init__(self, contender: MeasuredSystem, recorder: "Recorder") -> None:
        self.name = contender.name
        self._contender = contender
        self._recorder = recorder

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes:
        self._recorder.label = None if category == "warm-up" else self.name
        return await self._contender.answer(messages, sampling, category)
