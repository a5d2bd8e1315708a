"""Streams that are never idle: whoever has its text asks again. Target and draft read its prompt beside those who decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.clock import Clock
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine


@dataclass
class Served:
    """From when every stream has begun until as many more texts have ended as were asked for."""

    seconds: float = 0.0
    tokens: int = 0
    depths: list[int] = field(default_factory=list)  # of every sequence's rounds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def depth(self) -> float:
        return sum(self.depths) / len(self.depths)


def serve(
    engine: Engine, prompts: Sequence[list[int]], streams: int, tokens: int, requests: int, clock: Clock
) -> Served:
    """Texts have `tokens` tokens, the first of each stream fewer, so that they do not end together."""
    served, started, ended, asked = Served(), None, 0, 0
    begun: set[str] = set()

    def ask(max_tokens: int) -> None:
        nonlocal asked
        prompt = tuple(prompts[asked % len(prompts)])
        engine.add(
            Request(f"r{asked}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        )
        asked += 1

    for i in range(streams):
        ask(1 + tokens * i // streams)
    while ended < requests:
        outputs = engine.step()
        for output in outputs:
            begun.add(output.request_id)
            if output.finish_reason is not None:
                ended += started is not None
                ask(tokens)
        if started is not None:
            served.seconds = clock.now() - started
            served.tokens += sum(len(output.tokens) for output in outputs)
            served.depths += [output.drafted for output in outputs]
        elif all(f"r{i}" in begun for i in range(streams)):
            started = clock.now()
    for i in range(asked):
        engine.cancel(f"r{i}")
    return served
