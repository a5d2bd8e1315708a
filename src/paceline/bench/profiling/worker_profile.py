"""Measures the profile of a worker: passes by rows, steps by batch, contexts, prompts and drafts, on this machine."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from paceline.bench.profiling.memory_reads import kv_bytes_per_token
from paceline.bench.profiling.prompt_passes import (
    BLOCK,
    MAX_PASS_SECONDS,
    MAX_ROWS,
    attention_seconds,
    draft_prefill_seconds,
    pass_seconds,
    row_counts,
)
from paceline.bench.profiling.recorder import RecordedRound, Recorder
from paceline.bench.profiling.time_estimate import Part, PassTimes, Progress, TimeEstimate, sequences
from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams
from paceline.planning.profiles.curve import Curve, Figure
from paceline.planning.profiles.profile import WorkerProfile

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.models.runner import ModelRunner

STEP_TOKENS = 16
"""Steps of a measured batch."""
FIRST_TOKENS = 4
"""Tokens of the run before it, which captures graphs."""
TOKENS_PER_STEP = 1.2
"""Tokens of a step with drafts, as random prompts give; for the estimate of the time."""
PASSES_PER_SIZE = 4
"""Passes that time one size, for the same estimate."""
PROMPT_TOKENS = 240
"""Tokens of the prompts of a measured batch, if the cache holds them: the time of a draft step depends on them."""
CPU_PROMPT_TOKENS = 32
"""The same on a CPU, where prompts take most of the time of a measurement."""
CONTEXTS, PROMPTS = "contexts", "prompts"
"""Names of the first and the last measurement."""
MIN_SIZES = 2
"""Sizes of batches that are measured in any case."""
DEPTH = 4
"""Depth of the measured drafts."""
REPEATS = 3
NOMINAL_LINKS = {"nvlink": 450e9, "pcie5": 55e9, "25gbe": 3.125e9, "100gbe": 12.5e9, "200gbe": 25e9, "400gbe": 50e9}
"""Bytes per second."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per hour, and the network to draft workers; none of them can be measured here."""

    target: float = 0.0
    draft: float = 0.0
    round_trip_seconds: float = 1e-4


def measure_profile(
    llm: "LLM",
    name: str,
    start_seconds: float,
    prices: Prices,
    clock: Clock,
    on_part: Callable[[Progress], None] = lambda _: None,
    seconds: float = inf,
    source: str = "paceline profile",
) -> WorkerProfile:
    """The profile of an engine built with `calibration_config`. Its cache holds nothing of use afterwards.

    `seconds`: time after which no further size of a batch is measured; the smallest and the largest always are. `source`: the
    command, which the profile names.
    """
    from paceline.engine.sizing.calibration import measure_context  # imports torch

    runner, most = llm.engine.runner, llm.engine.scheduler.max_num_seqs
    deadline = clock.now() + seconds
    times = PassTimes(_decode_seconds(runner, 1, clock), _decode_seconds(runner, most, clock), most)
    estimate = TimeEstimate(_parts(llm, times, seconds), clock.now())

    def begin(name: str, is_measured: bool = True) -> None:
        on_part((estimate.begin if is_measured else estimate.leave_out)(name, clock.now()))

    begin(CONTEXTS)
    context = measure_context(runner, most, clock)
    rounds = _run_batches(llm, _sizes(most), clock, deadline, begin)
    plain = [one for one in rounds if not one.requested]
    steps = _step_seconds(rounds, context, _prompt_tokens(llm) + STEP_TOKENS)
    begin(PROMPTS)
    attention = attention_seconds(runner, clock)
    largest = max(one.batch for one in plain)
    overhead = max(0.0, steps.get(largest, 0.0) - _decode_seconds(runner, largest, clock))
    passes = pass_seconds(runner, llm.engine.scheduler.max_batched_tokens, clock, attention)
    prompts = _rising({rows: overhead + one for rows, one in passes.items()})
    drafts = _draft_seconds(rounds)
    prefill = draft_prefill_seconds(llm, clock) if drafts else 0.0
    measured = Curve(tuple(_merge(steps, prompts).items()), "measured", source)
    # A row of a prompt costs no more than one with logits. A pass of few rows, outside of a graph, may take longer.
    prompts = {rows: min(one, measured.at(rows)) for rows, one in prompts.items()}

    def figure(value: float) -> Figure:
        return Figure(value, "measured", source)

    def assumed(value: float, why: str) -> Figure:
        return Figure(value, "assumed", why)

    drafting = Curve(tuple(drafts.items()) if drafts else ((1, 1.0),), "measured" if drafts else "assumed", source)
    return WorkerProfile(
        name=name,
        pass_seconds=measured,
        prompt_seconds=Curve(tuple(prompts.items()), "measured", source),
        context_seconds=figure(context),
        prompt_context_seconds=figure(attention),
        draft_seconds=drafting,
        draft_prefill_seconds=figure(prefill),
        kv_bytes_per_token=figure(kv_bytes_per_token(runner)),
        kv_tokens=figure(runner.num_blocks * BLOCK),
        max_num_seqs=figure(most),
        start_seconds=figure(start_seconds),
        price_per_hour=assumed(prices.target, "command line"),
        draft_price_per_hour=assumed(prices.draft, "command line"),
        round_trip_seconds=assumed(prices.round_trip_seconds, "command line"),
        links={kind: assumed(rate, "nominal rate") for kind, rate in NOMINAL_LINKS.items()},
        about=f"{llm.config.model}, draft {llm.config.draft or 'none'}, on {_device(runner)}. Made by: {source}",
    )


def _device(runner: "ModelRunner") -> str:
    import torch

    return torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else runner.device.type


def _sizes(most: int) -> list[int]:
    """Powers of two and `most`: both ends first, then those half-way between, so that a curve of the first ones is useful."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    sizes += [most] * (sizes[-1] < most)
    ordered, spans = dict.fromkeys((sizes[0], sizes[-1])), [(0, len(sizes) - 1)]
    for low, high in spans:  # grows while it is read
        middle = (low + high) // 2
        if middle > low:
            ordered[sizes[middle]] = None
            spans += [(low, middle), (middle, high)]
    return list(ordered)


def _parts(llm: "LLM", times: PassTimes, limit: float) -> list[Part]:
    """The measurements with the times that they should take. `limit`: as `seconds` of `measure_profile`."""
    scheduler, prompt_tokens = llm.engine.scheduler, _prompt_tokens(llm)
    sizes, taken = _sizes(scheduler.max_num_seqs), 0.0
    parts = [Part(CONTEXTS, 2 * PASSES_PER_SIZE * times.most)]
    for number, batch in enumerate(sizes):
        prompts = 2.0 * times.at(batch * prompt_tokens)
        for depth in _depths(llm):
            steps = FIRST_TOKENS + STEP_TOKENS * (1 + depth // 2)
            steps_seconds = steps / (TOKENS_PER_STEP if depth else 1.0) * times.at(batch * (1 + depth))
            is_left_out = number >= MIN_SIZES and taken >= limit
            parts.append(Part(_batch_name(batch, depth), 0.0 if is_left_out else prompts + steps_seconds))
        taken = sum(part.seconds for part in parts)
    passes = [times.at(rows) for rows in row_counts(min(MAX_ROWS, scheduler.max_batched_tokens))]
    longest = [one for one in passes if one <= MAX_PASS_SECONDS]
    return [*parts, Part(PROMPTS, PASSES_PER_SIZE * (sum(longest) + 2.0 * passes[-1]))]


def _depths(llm: "LLM") -> tuple[int, ...]:
    return (0, DEPTH) if llm.engine.speculator.proposers else (0,)


def _batch_name(batch: int, depth: int) -> str:
    return sequences(batch) + ", with drafts" * bool(depth)


def _run_batches(
    llm: "LLM", sizes: Iterable[int], clock: Clock, deadline: float, begin: Callable[[str, bool], None]
) -> list[RecordedRound]:
    """Steps of batches of each size, without and with drafts. After the deadline only those of the first two sizes."""
    recorder = Recorder(clock)
    vocabulary, prompt_tokens = llm.engine.validator.limits.vocab_size, _prompt_tokens(llm)
    with llm.engine.hooks.listening(recorder):
        for number, batch in enumerate(sizes):
            is_measured = number < MIN_SIZES or clock.now() < deadline
            for depth in _depths(llm):
                begin(_batch_name(batch, depth), is_measured)
                if not is_measured:
                    continue
                for is_counted in (False, True):  # the first run captures graphs
                    recorder.label = f"{batch}/{depth}" if is_counted else None
                    tokens = STEP_TOKENS * (1 + depth // 2) if is_counted else FIRST_TOKENS
                    salt = f"profile/{batch}/{depth}/{is_counted}"
                    llm.generate(
                        [[(97 * i + 31 * j + 7) % vocabulary for j in range(prompt_tokens)] for i in range(batch)],
                        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0),
                        speculation={"enabled": True, "max_depth": depth} if depth else {"enabled": False},
                        cache_salt=salt,
                    )
        recorder.label = None
    return [one for one in recorder.rounds if one.is_decode and one.label.partition("/")[0] == str(one.batch)]


def _prompt_tokens(llm: "LLM") -> int:
    """Tokens of the prompts of a measured batch: half of the cache and of the longest sequence are left for outputs."""
    cached = llm.engine.runner.num_blocks * BLOCK // llm.engine.scheduler.max_num_seqs
    most = CPU_PROMPT_TOKENS if llm.engine.runner.device.type == "cpu" else PROMPT_TOKENS
    return max(1, min(most, cached // 2, llm.engine.validator.limits.max_model_len // 2))


def _step_seconds(rounds: Iterable[RecordedRound], context_seconds: float, context: int) -> dict[int, float]:
    """Time of a step without drafting and contexts, by rows; the host is included. `context`: tokens of each sequence."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for one in rounds:
        seconds[one.rows].append(one.times.total - one.times.draft - context_seconds * context * one.batch)
    return {rows: median(some) for rows, some in sorted(seconds.items()) if len(some) >= REPEATS and median(some) > 0.0}


def _draft_seconds(rounds: Iterable[RecordedRound]) -> dict[int, float]:
    """Time of drafting per token of the depth, by sequences; non-decreasing."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for one in rounds:
        if one.requested and any(outcome.levels for outcome in one.outcomes):
            seconds[one.batch].append(one.times.draft / one.requested)
    return _rising({batch: median(some) for batch, some in seconds.items() if len(some) >= REPEATS})


def _merge(steps: Mapping[int, float], prompts: Mapping[int, float]) -> dict[int, float]:
    """Whole steps up to the rows that were run; further rows cost as much as those of prompts, at least."""
    curve, largest = Curve(tuple(prompts.items()), "measured"), max(steps, default=0)
    start = max(0.0, steps[largest] - curve.at(largest)) if steps else 0.0
    return _rising(dict(steps) | {rows: start + one for rows, one in prompts.items() if rows > largest})


def _rising(curve: Mapping[int, float]) -> dict[int, float]:
    """The curve with no point above a later one: a disturbance makes a measurement too slow, never too fast."""
    found: dict[int, float] = {}
    least = inf
    for count, seconds in sorted(curve.items(), reverse=True):
        least = found[count] = min(least, seconds)
    return dict(sorted(found.items()))


def _decode_seconds(runner: "ModelRunner", batch: int, clock: Clock) -> float:
    """Time of the pass of a plain step of that many sequences, without the host's work before and after it."""
    from paceline.engine.sizing.calibration import median_seconds
    from paceline.models.runner import Span

    count = min(batch, (runner.num_blocks - 1) // 2)
    tables = [[1 + 2 * i, 2 + 2 * i] for i in range(count)]
    return median_seconds(runner, [Span(table, BLOCK, [0], num_logits=1) for table in tables], clock)
