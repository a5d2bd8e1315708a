"""A short run of an engine that finds out what speculation would do here: alpha, draft and pass times by method and depth."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.profiling.memory_reads import footprint
from paceline.bench.profiling.recorder import RecordedRound, Recorder
from paceline.bench.prompts import BenchPrompt
from paceline.bench.summary import MIN_TRIALS
from paceline.cluster.cost.cost import Footprint, Method, Target
from paceline.core.clock import Clock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.speculation.depth.step_time import Curve

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

MIN_SAMPLES = 3
TIMING_PROMPTS = 2
"""Enough to time a depth; alpha is measured at the largest, on all prompts."""
NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run: `sampling` seeds prompt i with `seed + i`; `batch` prompts at a time."""

    prompts: Sequence[BenchPrompt]
    sampling: SamplingParams
    max_depth: int
    batch: int = 1
    methods: tuple[str, ...] = ()
    """Which to look at; none named: all that the engine has."""


@dataclass(frozen=True, slots=True)
class Calibration:
    target: Target
    methods: tuple[Method, ...]
    silent: tuple[str, ...]
    """Methods that had nothing to offer, or too little to say anything about."""


def calibration_config(config: EngineConfig, max_depth: int) -> EngineConfig:
    """The same engine, drafting as deep as it is told however bad that is."""
    speculation = replace(
        config.speculation, enabled=True, depth="fixed", min_depth=None, max_depth=max_depth, breaker_rounds=NEVER
    )
    return replace(config, speculation=speculation)


def ladder(max_depth: int) -> list[int]:
    """1, 4, 16 and the largest: times are straight enough between."""
    return sorted({depth for depth in (1, 4, 16) if depth < max_depth} | {max_depth})


def calibrate(llm: "LLM", trial: Trial, clock: Clock, on_part: Callable[[str], None]) -> Calibration:
    """Needs an engine made with `calibration_config`. `on_part(what)` hears what is measured next."""
    engine = llm.engine
    prompts = list(islice(cycle(trial.prompts), max(len(trial.prompts), trial.batch)))
    half = max(trial.batch, len(prompts) // 2)
    methods = _methods(engine.speculator.proposers, trial.methods)
    _run(llm, trial, prompts[: trial.batch], "warm-up", {"enabled": False})
    recorder = Recorder(clock)
    with engine.listening(recorder):

        def measure(label: str, some: Sequence[BenchPrompt], speculation: Mapping[str, Any]) -> list[RecordedRound]:
            on_part(label)
            recorder.label, before = label, len(recorder.rounds)
            _run(llm, trial, some, label, speculation)
            recorder.label = None
            return [one for one in recorder.rounds[before:] if one.is_decode]

        # Plain decoding first and last: a machine that gets slower or faster meanwhile favours nobody.
        measure("plain", prompts[:half], {"enabled": False})
        rounds: dict[str, dict[int, list[RecordedRound]]] = {}
        for method in methods:
            by_depth = rounds[method] = {}
            varies = False
            for depth in reversed(ladder(trial.max_depth)):
                some = prompts if varies or not by_depth else prompts[: max(TIMING_PROMPTS, trial.batch)]
                wanted = {"method": method, "max_depth": depth}
                by_depth[depth] = measure(f"{method} at depth {depth}", some, wanted)
                varies = varies or _varies(by_depth[depth])
                if not any(outcome.levels for one in by_depth[depth] for outcome in one.outcomes):
                    break  # nothing to offer
        measure("plain", prompts[half:] or prompts[:half], {"enabled": False})
        every = [one for one in recorder.rounds if one.is_decode and one.batch == trial.batch]
    found = {
        method: summarise(method, by_depth, trial.batch, footprint(engine, method))
        for method, by_depth in rounds.items()
    }
    return Calibration(
        target=_target(llm, every, trial.batch),
        methods=tuple(method for method in found.values() if method is not None),
        silent=tuple(name for name, method in found.items() if method is None),
    )


def summarise(
    name: str, by_depth: Mapping[int, Sequence[RecordedRound]], batch: int, footprint: Footprint
) -> Method | None:
    """Rounds of one method, by the depth that was asked for. None: too few drafts to say anything."""
    # All prompts were run at the largest depth, and a few only at the others.
    outcomes = [outcome for one in by_depth[max(by_depth)] for outcome in one.outcomes]
    alphas = alphas_by_level((outcome.levels, outcome.accepted) for outcome in outcomes)
    drafts = {
        depth: median(seconds)
        for depth, rounds in by_depth.items()
        if (seconds := [one.times.draft for one in rounds if one.batch == batch and one.asked == depth])
    }
    if not alphas or not drafts:
        return None
    tokens, nodes = {}, {}
    if any(_varies(rounds) for rounds in by_depth.values()):
        tokens = {depth: 1.0 + _mean(o.accepted for one in by_depth[depth] for o in one.outcomes) for depth in drafts}
        offered = {depth: [o.nodes for one in by_depth[depth] for o in one.outcomes if o.nodes] for depth in drafts}
        nodes = {depth: _mean(some) for depth, some in offered.items() if some}
    return Method(
        name=name,
        alphas=alphas,
        draft_seconds=drafts,
        delivery=_mean(outcome.levels > 0 for outcome in outcomes),
        tokens=tokens,
        nodes=nodes,
        footprint=footprint,
    )


def alphas_by_level(rounds: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """From (levels, accepted): levels 1..accepted say yes, the next says no, the rest nothing. Seldom tested ones are left
    out."""
    hits: defaultdict[int, int] = defaultdict(int)
    trials: defaultdict[int, int] = defaultdict(int)
    for levels, accepted in rounds:
        for i in range(min(levels, accepted + 1)):
            trials[i] += 1
            hits[i] += i < accepted
    alphas: list[float] = []
    while trials[len(alphas)] >= MIN_TRIALS:
        alphas.append(hits[len(alphas)] / trials[len(alphas)])
    return tuple(alphas)


def pass_times(rounds: Iterable[RecordedRound]) -> dict[int, float]:
    """Rows -> what a step takes but for its drafts: the pass, sampling, and the CPU between. More rows never take less."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for one in rounds:
        seconds[one.rows].append(one.times.total - one.times.draft)
    known = {rows: some for rows, some in seconds.items() if len(some) >= MIN_SAMPLES}
    if not known:
        raise InvalidRequest("too few rounds to time anything: give longer answers (--tokens)", field="tokens")
    curve = Curve((rows, median(some), len(some)) for rows, some in known.items())
    return {rows: curve(rows) for rows in sorted(known)}


def _methods(available: Collection[str], wanted: Sequence[str]) -> list[str]:
    unknown = [method for method in wanted if method not in available]
    if unknown:
        raise InvalidRequest(
            f"no method {unknown[0]!r} here; choose from: {', '.join(sorted(available))}", field="methods"
        )
    return list(wanted or available)


def _run(llm: "LLM", trial: Trial, prompts: Sequence[BenchPrompt], label: str, speculation: Mapping[str, Any]) -> None:
    for first in range(0, len(prompts), trial.batch):
        wave = range(first, min(first + trial.batch, len(prompts)))
        llm.generate(
            [[{"role": "user", "content": prompts[i].turns[0]}] for i in wave],
            [replace(trial.sampling, seed=(trial.sampling.seed or 0) + i) for i in wave],
            speculation=speculation,
            # A salt of its own: no method may live on text that another run has written.
            cache_salt=f"calibrate/{label}/{first}",
        )


def _target(llm: "LLM", rounds: Iterable[RecordedRound], batch: int) -> Target:
    from paceline.engine.build import device_memory
    from paceline.engine.build import footprint as model_footprint
    from paceline.models.loading.load import LoadedModel

    model = llm.engine.runner.model
    loaded = LoadedModel(llm.config.model, model.config, model, llm.tokenizer)
    fit = model_footprint(loaded, llm.config, model.device)
    return Target(
        pass_seconds=pass_times(rounds),
        batch=batch,
        footprint=Footprint(fit.weight_bytes, fit.kv_bytes_per_token, fit.activation_bytes),
        kv_tokens=batch * llm.max_model_len,
        memory_bytes=int(device_memory(llm.engine.runner.device) * llm.config.memory_fraction),
    )


def _varies(rounds: Iterable[RecordedRound]) -> bool:
    """Whether drafts are anything but chains as long as asked for."""
    return any(outcome.levels not in (0, outcome.asked) for one in rounds for outcome in one.outcomes)


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)
