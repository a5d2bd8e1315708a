"""Who is measured: something that answers a conversation and says when each token came."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.bench.trace import Beat, Trace
from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

Message = Mapping[str, str]


class Contender(Protocol):
    name: str

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> Trace: ...


class EngineContender:
    """An engine in this process, with speculation on or off."""

    def __init__(self, name: str, llm: "LLM", speculative: bool, clock: Clock) -> None:
        self.name = name
        self._llm = llm
        self._speculative = speculative
        self._clock = clock

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> Trace:
        beats: list[Beat] = []
        ids: list[int] = []
        text = ""
        started = self._clock.now()
        # A salt of its own: nobody may live on the prefixes that the other contender computed.
        stream = self._llm.astream(
            messages,
            sampling,
            speculation={"enabled": self._speculative},
            category=category,
            cache_salt=f"bench/{self.name}",
        )
        async for output in stream:
            beats.append(Beat.of(output, self._clock.now()))
            ids += output.tokens
            text += output.text
        return Trace(category, started, tuple(beats), text, tuple(ids))
