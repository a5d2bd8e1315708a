"""For scripts that measure a GPU: runs of a batch, continuous load, distance of a text from the arg-max, time of a graph."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from paceline.core.clock import Clock
from paceline.core.request import Request, SamplingParams, SpeculationFlags
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.models.runner.runner import Span

BANDWIDTH = 4.3e12  # bytes per second of a large copy on an H200


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
class Run:
    """Decoding of one batch, from when all sequences decode until the first ends."""

    seconds: float = 0.0
    whole_seconds: float = 0.0
    """Time of the whole run, prefill included."""
    tokens: int = 0
    steps: int = 0
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of rounds by (drafted, accepted)."""
    device_seconds: float = 0.0
    draft_seconds: float = 0.0
    sample_seconds: float = 0.0
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def alpha(self) -> float:
        """Acceptance of a position, given that all before it were accepted."""
        tried = sum(count * (accepted + (accepted < drafted)) for (drafted, accepted), count in self.rounds.items())
        return sum(count * accepted for (_, accepted), count in self.rounds.items()) / tried if tried else 0.0

    @property
    def depth(self) -> float:
        return sum(count * drafted for (drafted, _), count in self.rounds.items()) / max(1, self.rounds.total())


def decode(engine: Engine, prompts: list[list[int]], max_tokens: int, temperature: float = 0.0) -> Run:
    run, sent_at, started, waiting = Run(), time.perf_counter(), 0.0, set()
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True)
        engine.add(engine.validate(Request(f"r{i}", tuple(prompt), sampling)))
        waiting.add(f"r{i}")
    run.texts = {name: [] for name in waiting}
    is_timed, at_first = True, engine.graph.num_steps
    while engine.has_work:
        rounds_before = engine.graph.num_steps
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            run.texts[output.request_id].extend(output.tokens)
            waiting.discard(output.request_id)
        if not started:
            if not waiting and engine.graph.num_steps > at_first + 1:
                started = now
            continue
        if not is_timed:
            continue
        run.seconds, run.steps = now - started, run.steps + bool(outputs)
        run.tokens += sum(len(output.tokens) for output in outputs)
        run.rounds.update((output.drafted, output.accepted) for output in outputs)
        if engine.graph.num_steps > rounds_before:
            step = engine.graph.last_result
            run.device_seconds += step.draft_seconds + step.verify_seconds
            run.draft_seconds += step.draft_seconds
            run.sample_seconds += step.verify_seconds - step.forward_seconds
        is_timed = all(output.finish_reason is None for output in outputs)
    run.whole_seconds = time.perf_counter() - sent_at
    return run


def switch(engine: Engine, enabled: bool, depth: int | None = None) -> None:
    engine.flags.apply(SpeculationFlags(enabled, None, depth))


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
        engine.add(
            engine.validate(
                Request(f"r{sent}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
            )
        )
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
