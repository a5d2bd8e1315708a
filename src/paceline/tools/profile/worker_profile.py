"""Measures the profile of a worker: passes by rows, steps by batch, contexts, prompts and drafts, on this machine."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from paceline.core.clock import Clock
from paceline.planning import ProfileCurve, ProfileValue, WorkerProfile
from paceline.tools.footprint import kv_bytes_per_token
from paceline.tools.profile.measurement import MeasurementProgress, ProfilePassTimes, TimeEstimate
from paceline.tools.profile.passes import (
    BLOCK,
    CONTEXTS,
    PROMPTS,
    STEP_TOKENS,
    attention_seconds,
    batch_sizes,
    draft_prefill_seconds,
    expected_parts,
    pass_seconds,
    prompt_tokens,
    run_batches,
)
from paceline.tools.profile.recorder import RecordedRound

if TYPE_CHECKING:
    from paceline.engine.start import LLM
    from paceline.models.runner import ModelRunner

REPEATS = 3
"""Steps of one size from which its median counts."""
NOMINAL_LINKS = {"nvlink": 450e9, "pcie5": 55e9, "25gbe": 3.125e9, "100gbe": 12.5e9, "200gbe": 25e9, "400gbe": 50e9}
"""Bytes per second."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per hour, and the round trip to draft workers, which cannot be measured here."""

    target: float = 0.0
    draft: float = 0.0
    round_trip_seconds: float = 1e-4


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is measured of an engine."""

    context_seconds: float
    """Time per token of context in a step."""
    steps: Mapping[int, float]
    """Time of a step by rows, with the host, without drafting and contexts."""
    drafts: Mapping[int, float]
    """Time of drafting per token of the depth, by sequences. Empty if the engine has no draft."""
    prompts: Mapping[int, float]
    """Time of a step over prompts by rows, with the host."""
    attention_seconds: float
    """Time per prompt row and token before it."""
    draft_prefill_seconds: float
    """Time per prompt token that the draft computes before it drafts."""


def measure_profile(
    llm: "LLM",
    name: str,
    start_seconds: float,
    prices: Prices,
    clock: Clock,
    on_part: Callable[[MeasurementProgress], None] = lambda _: None,
    seconds: float = inf,
    source: str = "paceline profile",
) -> WorkerProfile:
    """The profile of an engine built with `calibration_config`. Its cache holds nothing of use afterwards.

    After `seconds` no further size of a batch is measured, but the smallest and the largest are always measured. `source` is
    the command, which the profile names.
    """
    measured = _measure(llm, clock, on_part, seconds)
    return _to_profile(llm, name, measured, start_seconds, prices, source)


def _measure(llm: "LLM", clock: Clock, on_part: Callable[[MeasurementProgress], None], seconds: float) -> _Measured:
    """Measures contexts, batches and prompts, in that order."""
    from paceline.engine.sizing import measure_context  # imports torch

    runner, most = llm.engine.runner, llm.engine.scheduler.max_num_seqs
    deadline = clock.now() + seconds
    times = ProfilePassTimes(_decode_seconds(runner, 1, clock), _decode_seconds(runner, most, clock), most)
    estimate = TimeEstimate(expected_parts(llm, times, seconds), clock.now())

    def begin(name: str, is_measured: bool = True) -> None:
        on_part((estimate.begin if is_measured else estimate.leave_out)(name, clock.now()))

    begin(CONTEXTS)
    context = measure_context(runner, most, clock)
    rounds = run_batches(llm, batch_sizes(most), clock, deadline, begin)
    steps = _step_seconds(rounds, context, prompt_tokens(llm) + STEP_TOKENS)
    drafts = _draft_seconds(rounds)
    begin(PROMPTS)
    attention = attention_seconds(runner, clock)
    largest = max(round_.batch for round_ in rounds if not round_.requested)
    overhead = max(0.0, steps.get(largest, 0.0) - _decode_seconds(runner, largest, clock))
    passes = pass_seconds(runner, llm.engine.scheduler.max_batched_tokens, clock, attention)
    prompts = _rising({rows: overhead + seconds for rows, seconds in passes.items()})
    prefill = draft_prefill_seconds(llm, clock) if drafts else 0.0
    return _Measured(context, steps, drafts, prompts, attention, prefill)


def _to_profile(
    llm: "LLM", name: str, measured: _Measured, start_seconds: float, prices: Prices, source: str
) -> WorkerProfile:
    runner, scheduler = llm.engine.runner, llm.engine.scheduler

    def figure(value: float) -> ProfileValue:
        return ProfileValue(value, "measured", source)

    def assumed(value: float, why: str) -> ProfileValue:
        return ProfileValue(value, "assumed", why)

    passes = ProfileCurve(tuple(_merge(measured.steps, measured.prompts).items()), "measured", source)
    # A row of a prompt costs no more than one with logits. A pass of few rows, outside of a graph, may take longer.
    prompts = {rows: min(seconds, passes.at(rows)) for rows, seconds in measured.prompts.items()}
    drafts = measured.drafts
    return WorkerProfile(
        name=name,
        pass_seconds=passes,
        prompt_seconds=ProfileCurve(tuple(prompts.items()), "measured", source),
        context_seconds=figure(measured.context_seconds),
        prompt_context_seconds=figure(measured.attention_seconds),
        draft_seconds=ProfileCurve(tuple(drafts.items()) or ((1, 1.0),), "measured" if drafts else "assumed", source),
        draft_prefill_seconds=figure(measured.draft_prefill_seconds),
        kv_bytes_per_token=figure(kv_bytes_per_token(runner)),
        kv_tokens=figure(runner.num_blocks * BLOCK),
        max_num_seqs=figure(scheduler.max_num_seqs),
        start_seconds=figure(start_seconds),
        price_per_hour=assumed(prices.target, "command line"),
        draft_price_per_hour=assumed(prices.draft, "command line"),
        round_trip_seconds=assumed(prices.round_trip_seconds, "command line"),
        links={kind: assumed(rate, "nominal rate") for kind, rate in NOMINAL_LINKS.items()},
        is_padded=runner.device.type == "cuda",
        about=f"{llm.config.model}, draft {llm.config.draft or 'none'}, on {_device(runner)}. Made by: {source}",
    )


def _device(runner: "ModelRunner") -> str:
    import torch

    return torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else runner.device.type


def _step_seconds(rounds: Iterable[RecordedRound], context_seconds: float, context: int) -> dict[int, float]:
    """Time of a step without drafting and contexts, by rows. The host is included. Each sequence has `context` tokens."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for round_ in rounds:
        seconds[round_.rows].append(round_.times.total - round_.times.draft - context_seconds * context * round_.batch)
    return {rows: median(some) for rows, some in sorted(seconds.items()) if len(some) >= REPEATS and median(some) > 0.0}


def _draft_seconds(rounds: Iterable[RecordedRound]) -> dict[int, float]:
    """Time of drafting per token of the depth, by sequences. It does not decrease."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for round_ in rounds:
        if round_.requested and any(outcome.levels for outcome in round_.outcomes):
            seconds[round_.batch].append(round_.times.draft / round_.requested)
    return _rising({batch: median(some) for batch, some in seconds.items() if len(some) >= REPEATS})


def _merge(steps: Mapping[int, float], prompts: Mapping[int, float]) -> dict[int, float]:
    """Whole steps up to the rows that were run. Further rows cost at least as much as those of prompts."""
    curve, largest = ProfileCurve(tuple(prompts.items()), "measured"), max(steps, default=0)
    start = max(0.0, steps[largest] - curve.at(largest)) if steps else 0.0
    return _rising(dict(steps) | {rows: start + seconds for rows, seconds in prompts.items() if rows > largest})


def _rising(curve: Mapping[int, float]) -> dict[int, float]:
    """The curve with no point above a later one: a disturbance makes a measurement too slow, never too fast."""
    found: dict[int, float] = {}
    least = inf
    for count, seconds in sorted(curve.items(), reverse=True):
        least = found[count] = min(least, seconds)
    return dict(sorted(found.items()))


def _decode_seconds(runner: "ModelRunner", batch: int, clock: Clock) -> float:
    """Time of the pass of a plain step of that many sequences, without the host's work before and after it."""
    from paceline.engine.sizing import median_seconds
    from paceline.models.runner import Span

    count = min(batch, (runner.num_blocks - 1) // 2)
    tables = [[1 + 2 * i, 2 + 2 * i] for i in range(count)]
    return median_seconds(runner, [Span(table, BLOCK, [0], num_logits=1) for table in tables], clock)
