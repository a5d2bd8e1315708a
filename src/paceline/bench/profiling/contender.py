"""A contender whose rounds are written down under its name."""

from collections.abc import Sequence

from paceline.bench.contender import Contender, Message
from paceline.bench.profiling.recorder import Recorder
from paceline.bench.trace import Trace
from paceline.core.sampling import SamplingParams


class ProfiledContender:
    """Contenders take turns, so the one that answers is the one whose rounds these are. The warm-up does not count."""

    def __init__(self, contender: Contender, recorder: Recorder) -> None:
        self.name = contender.name
        self._contender = contender
        self._recorder = recorder

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> Trace:
        self._recorder.label = None if category == "warm-up" else self.name
        return await self._contender.answer(messages, sampling, category)
