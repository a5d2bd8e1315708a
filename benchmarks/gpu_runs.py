"""For scripts that measure a GPU: continuous load, the distance of a text from the arg-max, and the time of a graph."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from paceline.core.clock import Clock
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import Span


def largest_gap(engine: Engine, prompt: list[int], text: list[int]) -> float:
    """The largest distance of any token's logit from the arg-max, rescored in one pass. The engine must be idle: the pass
    overwrites its KV cache."""
    ids = prompt + text[:-1]
    logits = engine.runner.forward([Span(range(-(-len(ids) // BLOCK_SIZE)), 0, ids, len(text))]).logits
    chosen = logits.gather(1, torch.tensor(text, device=logits.device).unsqueeze(1)).squeeze(1)
    return float((logits.amax(1) - chosen).max())


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Device time of one replay, the median of five."""
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end))
    return median(times)


@dataclass
class Served:
    """Figures from when every stream has its first token until `requests` more texts have ended."""

    seconds: float = 0.0
    tokens: int = 0
    depths: list[int] = field(default_factory=list)  # of all rounds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def depth(self) -> float:
        return sum(self.depths) / len(self.depths)


def serve(
    engine: Engine, prompts: Sequence[list[int]], streams: int, tokens: int, requests: int, clock: Clock
) -> Served:
    """Run `streams` streams that each send the next request when a text ends. First texts are shorter, so that texts do not end
    together."""
    served, started, ended, sent = Served(), None, 0, 0
    begun: set[str] = set()

    def send(max_tokens: int) -> None:
        nonlocal sent
        prompt = tuple(prompts[sent % len(prompts)])
        engine.add(Request(f"r{sent}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)))
        sent += 1

    for i in range(streams):
        send(1 + tokens * i // streams)
    while ended < requests:
        outputs = engine.step()
        for output in outputs:
            begun.add(output.request_id)
            if output.finish_reason is not None:
                ended += started is not None
                send(tokens)
        if started is not None:
            served.seconds = clock.now() - started
            served.tokens += sum(len(output.tokens) for output in outputs)
            served.depths += [output.drafted for output in outputs]
        elif all(f"r{i}" in begun for i in range(streams)):
            started = clock.now()
    for i in range(sent):
        engine.cancel(f"r{i}")
    return served
